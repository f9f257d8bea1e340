def test_a(artifacts): pass

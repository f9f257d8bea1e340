// Atomics: one thread runs at a time and none is interrupted, so plain ones will do.
#pragma once

template <class T, class Change>
inline T emu_atomic(T* address, Change change) {
  T old = *address;
  *address = change(old);
  return old;
}

template <class T>
inline T atomicAdd(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return T(old + value); });
}
template <class T>
inline T atomicSub(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return T(old - value); });
}
template <class T>
inline T atomicMax(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return old > value ? old : value; });
}
template <class T>
inline T atomicMin(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return old < value ? old : value; });
}
template <class T>
inline T atomicExch(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T) { return value; });
}
template <class T>
inline T atomicOr(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return T(old | value); });
}
template <class T>
inline T atomicAnd(T* address, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return T(old & value); });
}
template <class T>
inline T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return emu_atomic(address, [&](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emu_atomic(address, [&](unsigned old) { return old >= last ? 0u : old + 1; });
}

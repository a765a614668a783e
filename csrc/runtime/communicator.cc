#include "runtime/communicator.h"

#include "core/operation.h"

namespace herring::runtime {

std::uint64_t name_key(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash | kNamedKey;
}

// No key is used twice: an operation that has ended on this rank may still be read by a neighbour, be moving from a
// lost server on another, or a late one may not have come to it.
std::uint64_t use_key(std::uint64_t name, std::uint64_t use) {
  return (name ^ use * 0x9E3779B97F4A7C15ull) | kNamedKey;
}

}  // namespace herring::runtime

#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>

/// A message in memory: two spans, one behind the other.
namespace herring::tcp {

template <class Byte>
struct TwoSpans {
  std::span<Byte> first;
  std::span<Byte> second;

  std::size_t size() const { return first.size() + second.size(); }

  /// Appends what lies in [from, from + most) to `out`, of which `count` entries are used; returns the new count.
  std::size_t slice(std::size_t from, std::size_t most, std::span<iovec> out, std::size_t count) const {
    for (std::span<Byte> span : {first, second}) {
      const std::size_t skipped = std::min(from, span.size());
      from -= skipped;
      span = span.subspan(skipped);
      span = span.first(std::min(most, span.size()));
      most -= span.size();
      // iovec has no const; what is sent is not written to.
      if (!span.empty()) out[count++] = {const_cast<std::remove_const_t<Byte>*>(span.data()), span.size()};
    }
    return count;
  }
};

/// Copies to [at, at + bytes.size()) what fits there.
inline void copy_in(const TwoSpans<std::byte>& to, std::size_t at, std::span<const std::byte> bytes) {
  std::array<iovec, 2> parts{};
  const std::size_t count = to.slice(at, bytes.size(), parts, 0);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(parts[i].iov_base, bytes.data(), parts[i].iov_len);
    bytes = bytes.subspan(parts[i].iov_len);
  }
}

}  // namespace herring::tcp

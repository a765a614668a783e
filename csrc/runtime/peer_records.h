#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/operation.h"
#include "runtime/communicator.h"
#include "runtime/peer_group.h"
#include "staging/peer_engine.h"

/// What ranks of a PeerGroup tell each other.
namespace herring::runtime {

/// Within each host: to meet, to share, to watch.
inline constexpr std::uint32_t kGroupsOfHost = 3;
/// Of those between hosts, the one of ranks 0; below are those of each host.
inline constexpr std::uint32_t kFirstNetworkGroup = (1u << kPeerGroupBits) - PeerGroup::kMostMembers;

/// What a rank says where all come together: as many numbers for each, in the order of the members. The others add
/// zeros.
inline constexpr std::size_t kRecord = 4 + kMaxDims;
using Record = std::array<std::int64_t, kRecord>;

class Records final {
 public:
  Records(std::size_t members, std::size_t own, const Record& record) : numbers_(members * kRecord) {
    std::ranges::copy(record, numbers_.begin() + static_cast<std::ptrdiff_t>(own * kRecord));
  }
  Record of(std::size_t member) const {
    Record record;
    std::copy_n(numbers_.begin() + static_cast<std::ptrdiff_t>(member * kRecord), kRecord, record.begin());
    return record;
  }
  Request request(GroupId group, Duration timeout) {
    Request request;
    request.group = group;
    request.descriptor.dtype = DataType::kInt64;
    const std::int64_t count = static_cast<std::int64_t>(numbers_.size());
    set_shape(request.descriptor, std::span(&count, 1));
    request.output = std::as_writable_bytes(std::span(numbers_));
    request.input = request.output;
    request.timeout = timeout;
    return request;
  }

 private:
  std::vector<std::int64_t> numbers_;
};

inline Record record_of(const OpDescriptor& descriptor, const staging::Piece& piece) {
  Record record{};
  record[0] = static_cast<std::int64_t>(descriptor.dtype) | static_cast<std::int64_t>(descriptor.reduce) << 8 |
              std::int64_t{descriptor.dims} << 16;
  record[1] = static_cast<std::int64_t>(descriptor.op_bytes);
  record[2] = static_cast<std::int64_t>(piece.offset);
  record[3] = static_cast<std::int64_t>(piece.number) + 1;
  std::ranges::copy(descriptor.shape, record.begin() + 4);
  return record;
}

inline OpDescriptor descriptor_of(const Record& record) {
  OpDescriptor descriptor;
  descriptor.dtype = static_cast<DataType>(record[0] & 0xFF);
  descriptor.reduce = static_cast<ReduceOp>(record[0] >> 8 & 0xFF);
  descriptor.dims = static_cast<std::uint8_t>(record[0] >> 16 & 0xFF);
  descriptor.op_bytes = static_cast<std::uint64_t>(record[1]);
  std::copy_n(record.begin() + 4, kMaxDims, descriptor.shape.begin());
  return descriptor;
}

}  // namespace herring::runtime

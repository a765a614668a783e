#include "runtime/peer_agreement.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "runtime/peer_records.h"

namespace herring::runtime {

PeerNumbers agree(Communicator& communicator, GroupId group, const std::vector<std::uint32_t>& ranks,
                  std::uint32_t rank, Duration timeout, const Status& own, const char* what, const PeerNumbers& said) {
  static_assert(std::tuple_size_v<PeerNumbers> < kRecord);
  const auto self = std::ranges::find(ranks, rank) - ranks.begin();
  Record record{};
  record[0] = 1 + static_cast<std::int64_t>(own.code());
  if (self == 0) std::ranges::copy(said, record.begin() + 1);
  Records records(ranks.size(), static_cast<std::size_t>(self), record);
  const std::shared_ptr<Work> work = communicator.submit(records.request(group, timeout));
  {
    const auto ask = [work] { return Awaited{work.get(), "the group's first all_reduce on GPUs", work}; };
    const std::shared_ptr<void> blocked = communicator.block(ask, false);
    work->wait(Instant::max());
  }
  if (!own.is_ok()) throw Error(own);
  if (!work->status().is_ok()) {
    throw Error(work->status().code(),
                "while ranks come together to reduce on their GPUs: " + work->status().message());
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (records.of(i)[0] == 1 + static_cast<std::int64_t>(Code::kOk)) continue;
    throw Error(Code::kUnavailable, "rank " + std::to_string(ranks[i]) + " " + what + "; its own message says why");
  }
  PeerNumbers heard;
  const Record first = records.of(0);
  std::copy_n(first.begin() + 1, heard.size(), heard.begin());
  return heard;
}

Status compare(const Records& said, const std::vector<std::uint32_t>& ranks, std::uint32_t number, GroupId group) {
  std::size_t same = 1;
  while (same < ranks.size() && said.of(same) == said.of(0)) ++same;
  if (same == ranks.size()) return Status::ok();
  std::string text = "ranks disagree about operation " + std::to_string(number) + " of process group " +
                     std::to_string(group.value - kFirstFrameworkGroup) + " on GPUs: ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? "; rank " : "rank ") + std::to_string(ranks[i]) + ": " + to_string(descriptor_of(said.of(i)));
  }
  return {Code::kMismatch, std::move(text)};
}

}  // namespace herring::runtime

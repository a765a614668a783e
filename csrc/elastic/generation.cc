#include "elastic/generation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/status.h"

namespace herring::elastic {
namespace {

// What workers tell each other while nothing else moves is small, and a loss is noticed much earlier.
constexpr Duration kGatherTimeout = std::chrono::seconds(60);

void all_gather(runtime::Runtime& runtime, const std::string& name, std::span<const std::byte> mine,
                std::span<std::byte> all) {
  runtime::Request request;
  request.name = name;
  request.descriptor.collective = Collective::kAllGather;
  request.descriptor.dtype = DataType::kUInt8;
  request.descriptor.dims = 1;
  request.descriptor.shape[0] = mine.size();
  request.input = mine;
  request.output = all;
  request.timeout = kGatherTimeout;
  const std::shared_ptr<runtime::Work> work = runtime.submit(request);
  work->wait(Instant::max());
  work->status().or_throw();
}

/// One blob of each worker, by rank.
std::vector<std::vector<std::byte>> gather(runtime::Runtime& runtime, const std::string& name,
                                           std::span<const std::byte> blob) {
  const std::size_t workers = runtime.size();
  const std::uint64_t mine = blob.size();
  std::vector<std::uint64_t> sizes(workers);
  all_gather(runtime, name + ".sizes", std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(sizes)));
  const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
  std::vector<std::byte> padded(most);
  std::copy(blob.begin(), blob.end(), padded.begin());
  std::vector<std::byte> all(most * workers);
  all_gather(runtime, name + ".blobs", padded, all);
  std::vector<std::vector<std::byte>> blobs;
  for (std::size_t rank = 0; rank < workers; ++rank) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(rank * most);
    blobs.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(sizes[rank]));
  }
  return blobs;
}

}  // namespace

Config config_of(const Home& home, const Message& go) {
  Config config = home.config;
  config.servers = go.servers;
  return config;
}

std::shared_ptr<control::HubClient> join_hub(const Home& home, control::Role role, const Message& go, Instant deadline,
                                             std::function<bool()> is_over) {
  control::HubClientOptions options;
  options.host = home.host;
  options.ports = {go.port};
  options.secret = home.config.secret;
  options.self = home.self;
  options.self.role = role;
  options.self.rank = go.rank;
  options.workers = go.workers;
  options.servers = go.servers;
  options.holder = "the rendezvous";
  options.is_over = std::move(is_over);
  return std::make_shared<control::HubClient>(options, deadline);
}

Generation build(const Home& home, const Message& go, Instant deadline, std::function<bool()> is_over) {
  Generation generation;
  generation.number = go.generation;
  generation.members = go.members;
  generation.hub = join_hub(home, control::Role::kWorker, go, deadline, std::move(is_over));
  try {
    generation.runtime = std::make_shared<runtime::Runtime>(
        runtime::RuntimeOptions{config_of(home, go), generation.hub, go.rank, home.fabric_search, {}, true}, deadline);
  } catch (const std::exception& error) {
    generation.hub->report_failure(error.what());
    throw;
  }
  return generation;
}

std::vector<Summary> exchange(runtime::Runtime& runtime, const std::string& name, const Summary& mine) {
  std::vector<Summary> summaries;
  for (const std::vector<std::byte>& blob : gather(runtime, name, encode(mine))) {
    auto summary = decode_summary(blob);
    if (!summary) {
      throw Error(Code::kProtocol, "worker " + std::to_string(summaries.size()) + " sent an unreadable journal");
    }
    summaries.push_back(std::move(*summary));
  }
  return summaries;
}

}  // namespace herring::elastic

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <iostream>
#include <random>

#include "point_to_point/message_cluster.h"
#include "seeds.h"

/// Somebody who sees every posted receive sends to all of them, at every moment, messages that are random or right in
/// all but one thing. A receive that ends well has the right bytes; every operation ends.
namespace herring::point_to_point::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

std::uint64_t pick(Random& random, std::uint64_t least, std::uint64_t most) {
  return std::uniform_int_distribution<std::uint64_t>(least, most)(random);
}
bool chance(Random& random, double share) { return std::uniform_real_distribution<>(0, 1)(random) < share; }

Bytes random_bytes(Random& random, std::size_t count) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class Stranger {
 public:
  explicit Stranger(Cluster& cluster) : cluster_(cluster), endpoint_(cluster.network().open_endpoint()) {
    const std::uint32_t endpoints = cluster.options().workers * Cluster::kLinks;
    for (std::uint32_t i = 0; i < endpoints; ++i) {
      endpoint_->add_peer(PeerId{i}, cluster.endpoint(i / Cluster::kLinks, i % Cluster::kLinks).address());
    }
  }

  /// To a receive for data that some worker has posted at this moment; false where there is none.
  bool strike(Random& random) {
    const auto victim = static_cast<std::uint32_t>(pick(random, 0, cluster_.options().workers * Cluster::kLinks - 1));
    std::vector<transport::SimNetwork::Posted> tags = cluster_.network().posted(victim);
    std::erase_if(tags, [](const auto& posted) { return posted.tag == kControlTag; });
    if (tags.empty()) return false;
    transport::SimNetwork::Posted target = tags[pick(random, 0, tags.size() - 1)];
    if (chance(random, 0.2)) target.tag.value += pick(random, 1, 3);
    if (chance(random, 0.1)) target.bytes += pick(random, 1, 70);
    if (chance(random, 0.1)) target.bytes = pick(random, 0, target.bytes);
    Bytes& bytes = sent_.emplace_back(random_bytes(random, target.bytes));
    if (chance(random, 0.8)) imitate(random, victim / Cluster::kLinks, target.tag, bytes);
    const bool is_sent = endpoint_->post_send(PeerId{victim}, target.tag, bytes, {}, Token{sent_.size()}).is_ok();
    strikes_ += is_sent ? 1 : 0;
    return is_sent;
  }
  std::uint64_t strikes() const { return strikes_; }

 private:
  /// As the chunk that the victim waits for, but for one thing.
  void imitate(Random& random, std::uint32_t victim, Tag tag, std::span<std::byte> bytes) {
    if (bytes.size() < wire::kHeaderBytes) return;
    const ClusterOptions& options = cluster_.options();
    const auto sender = static_cast<std::uint32_t>((victim + pick(random, 1, options.workers - 1)) % options.workers);
    wire::Header header;
    header.type = wire::MessageType::kData;
    header.job_id = Cluster::kJob;
    header.sender = sender;
    header.op = pick(random, 1, 4);
    header.tag = tag.value;
    header.chunk = static_cast<std::uint32_t>(pick(random, 0, 4));
    header.offset =
        std::uint64_t{header.chunk} * (cluster_.is_near(victim, sender) ? options.near : options.far).chunk_bytes;
    header.payload_bytes = static_cast<std::uint32_t>(bytes.size() - wire::kHeaderBytes);
    switch (pick(random, 0, 6)) {
      case 0:
        header.job_id ^= 1;
        break;
      case 1:
        ++header.epoch;
        break;
      case 2:
        header.sender = options.workers + 1;
        break;
      case 3:
        header.op += 5000;
        break;
      case 4:
        header.tag += 7;
        break;
      case 5:
        header.type = wire::MessageType::kPush;
        break;
      default:
        header.offset += 8;
    }
    const auto head = wire::encode(header);
    std::copy(head.begin(), head.end(), bytes.begin());
  }

  Cluster& cluster_;
  std::unique_ptr<transport::Endpoint> endpoint_;
  std::deque<Bytes> sent_;
  std::uint64_t strikes_ = 0;
};

struct Message {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  Bytes data;
  Bytes memory;
  std::uint64_t sent = 0;  // Handles.
  std::uint64_t received = 0;
};

struct Coverage {
  std::uint64_t strikes = 0;
  std::uint64_t rejected = 0;
  std::uint64_t good = 0;
  std::uint64_t failed = 0;
};

ClusterOptions random_options(Random& random, std::uint64_t seed) {
  ClusterOptions options;
  options.seed = seed;
  options.workers = static_cast<std::uint32_t>(pick(random, 2, 4));
  options.hosts = static_cast<std::uint32_t>(pick(random, 1, options.workers));
  options.strict = seed % 5 == 0;
  return options;
}

void run_attack(std::uint64_t seed, Coverage& coverage) {
  Random random(seed);
  Cluster cluster(random_options(random, seed));
  const std::uint32_t workers = cluster.options().workers;
  Stranger stranger(cluster);
  std::vector<Message> messages(pick(random, 1, 12));
  for (Message& message : messages) {
    message.from = static_cast<std::uint32_t>(pick(random, 0, workers - 1));
    message.to = static_cast<std::uint32_t>((message.from + pick(random, 1, workers - 1)) % workers);
    message.data = random_bytes(random, pick(random, 0, 1500));
    message.memory.resize(message.data.size());
  }
  const double often = chance(random, 0.5) ? 0.5 : 0.05;
  std::uint64_t left = pick(random, 1, 30);
  const auto play = [&] {
    cluster.run_until(cluster.now() + std::chrono::microseconds(pick(random, 1, 40)));
    if (left > 0 && chance(random, often) && stranger.strike(random)) --left;
  };
  constexpr Duration kLimit = std::chrono::seconds(50);
  for (std::uint64_t tag = 0; tag < messages.size(); ++tag) {
    Message& message = messages[tag];
    const auto send = [&] {
      message.sent = cluster.send(message.from, {0, GroupId{7}, PeerId{message.to}, tag, message.data, kLimit});
    };
    const auto receive = [&] {
      message.received =
          cluster.receive(message.to, {0, GroupId{7}, {PeerId{message.from}}, tag, message.memory, kLimit});
    };
    const bool is_early = chance(random, 0.5);
    is_early ? receive() : send();
    for (std::uint64_t i = pick(random, 0, 5); i > 0; --i) play();
    is_early ? send() : receive();
    play();
  }
  for (int i = 0; i < 200; ++i) play();
  ASSERT_TRUE(cluster.run_until_idle(std::chrono::seconds(100))) << "something never ended";
  for (const Message& message : messages) {
    const Completion* const sent = cluster.find(message.sent);
    const Completion* const received = cluster.find(message.received);
    ASSERT_TRUE(sent != nullptr && received != nullptr);
    ++(received->status.is_ok() ? coverage.good : coverage.failed);
    if (received->status.is_ok()) {
      EXPECT_EQ(message.memory, message.data) << "it ended well with wrong bytes";
      EXPECT_TRUE(sent->status.is_ok()) << sent->status.to_string();
    }
    for (const Status& status : {sent->status, received->status}) {
      EXPECT_NE(status.code(), Code::kTimeout) << status.to_string();
    }
  }
  coverage.strikes += stranger.strikes();
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    coverage.rejected += cluster.engine(rank).stats().messages_rejected;
  }
}

TEST(MessageStrangers, NobodyReceivesWhatTheyWrote) {
  const herring::testing::SeedRange range = herring::testing::seeds(2000);
  Coverage coverage;
  for (std::uint64_t seed = range.first; seed < range.first + range.count; ++seed) {
    run_attack(seed, coverage);
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed << " fails; HERRING_TEST_SEED=" << seed;
  }
  std::cout << coverage.strikes << " strikes, " << coverage.rejected << " messages refused, " << coverage.good
            << " messages arrived, " << coverage.failed << " did not\n";
  if (range.count < 500) return;
  EXPECT_GT(coverage.strikes, range.count);
  EXPECT_GT(coverage.rejected, range.count / 2);
  EXPECT_GT(coverage.good, range.count);
}

}  // namespace
}  // namespace herring::point_to_point::testing

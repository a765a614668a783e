#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine_program.h"
#include "mutate.h"
#include "require.h"
#include "runtime/checked_endpoint.h"
#include "runtime/checked_frame.h"

/// Frames and reports that are anything, between an endpoint with checksums and a transport that does anything it may.
/// No crash, no post that completes twice, no touch of memory that was given back, and nothing left once all are gone.
namespace herring::fuzz {
namespace {

using namespace runtime;
using transport::Completion;
using transport::CompletionKind;

constexpr std::uint64_t kJob = 77;
constexpr std::uint32_t kPeers = 3;

void check_codec(std::span<const std::byte> bytes) {
  if (const auto frame = decode_frame(bytes)) {
    const auto again = encode(*frame);
    HERRING_REQUIRE(std::equal(again.begin(), again.end(), bytes.begin()));
  }
  if (const auto report = decode_report(bytes)) {
    HERRING_REQUIRE(report->arrived.size() <= kMaxReportEntries && report->damaged.size() <= kMaxReportEntries);
    HERRING_REQUIRE(decode_report(encode(*report)) == report);
  }
}

/// What is posted, for the harness to complete.
class Wire final : public transport::Endpoint {
 public:
  struct Post {
    Tag tag;
    std::span<std::byte> first;
    std::span<std::byte> second;
    Token token;
  };
  struct Sent {
    PeerId to;
    Tag tag;
    std::vector<std::byte> bytes;
    std::span<const std::byte> borrowed;
    Token token;
  };

  const transport::Address& address() const override { return address_; }
  std::string description() const override { return "wire"; }
  void add_peer(PeerId, std::span<const std::byte>) override {}
  void remove_peer(PeerId peer) override {
    for (auto send = sends.begin(); send != sends.end();) {
      if (send->to != peer) {
        ++send;
        continue;
      }
      done.push_back({send->token, CompletionKind::kSend, 0, Status(Code::kPeerLost, "removed")});
      send = sends.erase(send);
    }
  }
  Status post_send(PeerId to, Tag tag, std::span<const std::byte> first, std::span<const std::byte> second,
                   Token token) override {
    if (is_full) return Status::again();
    std::vector<std::byte> bytes(first.begin(), first.end());
    bytes.insert(bytes.end(), second.begin(), second.end());
    sends.push_back({to, tag, std::move(bytes), second, token});
    return {};
  }
  Status post_receive(Tag tag, std::span<std::byte> first, std::span<std::byte> second, Token token) override {
    if (is_full) return Status::again();
    receives.push_back({tag, first, second, token});
    return {};
  }
  void cancel_receive(Token token) override {
    if (std::erase_if(receives, [token](const Post& post) { return post.token == token; }) == 0) return;
    done.push_back({token, CompletionKind::kCancelled, 0, {}});
  }
  std::size_t poll(std::span<Completion> completions) override {
    const std::size_t count = std::min(completions.size(), done.size());
    std::move(done.begin(), done.begin() + static_cast<std::ptrdiff_t>(count), completions.begin());
    done.erase(done.begin(), done.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  void wait(Instant, std::span<const int>) override {}
  bool prepare_wait(std::vector<int>&, Instant&) override { return false; }
  void wake() override {}
  void shut_down() override {}

  std::vector<Post> receives;
  std::vector<Sent> sends;
  std::vector<Completion> done;
  bool is_full = false;

 private:
  transport::Address address_;
};

class Harness {
 public:
  explicit Harness(std::span<const std::uint8_t> input) : program_(input) {
    CheckedOptions options;
    options.self = PeerId{kPeers};
    options.job_id = kJob;
    options.max_head_bytes = 200;
    options.is_pooled = [](Tag tag) { return tag == kControlTag; };
    options.max_damaged = 3;
    options.now = [this] { return now_; };
    auto wire = std::make_unique<Wire>();
    wire_ = wire.get();
    endpoint_ = std::make_unique<CheckedEndpoint>(std::move(wire), options);
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) endpoint_->add_peer(PeerId{peer}, {});
  }

  void run() {
    while (!program_.at_end()) {
      step(program_.next() % 9);
      poll();
    }
    end();
  }

 private:
  struct Memory {
    std::vector<std::byte> head;
    std::vector<std::byte> data;
  };

  void step(std::uint8_t what) {
    switch (what) {
      case 0:
        return post(true);
      case 1:
        return post(false);
      case 2:
        return arrive();
      case 3:
        return report();
      case 4:
        return sent(program_.next(), Status::ok());
      case 5:
        return sent(program_.next(), Status(Code::kTransport, "no route"));
      case 6:
        now_ += std::chrono::milliseconds(20 * program_.next());
        return;
      case 7:
        if (!posted_.empty()) {
          const auto at = static_cast<std::ptrdiff_t>(program_.next() % posted_.size());
          endpoint_->cancel_receive(Token{std::next(posted_.begin(), at)->first});
        }
        return;
      default:
        wire_->is_full = (program_.next() & 3u) == 0;
        return;
    }
  }

  void post(bool is_send) {
    const std::uint8_t detail = program_.next();
    auto memory = std::make_unique<Memory>();
    memory->head.resize(80, std::byte{1});
    memory->data.resize((detail & 16u) != 0 ? 300 : 0, std::byte{2});
    const Tag tag = (detail & 32u) != 0 ? kControlTag : Tag{100 + (detail & 3u)};
    const Token token{next_token_++};
    const Status status = is_send
                              ? endpoint_->post_send(PeerId{detail % kPeers}, tag, memory->head, memory->data, token)
                              : endpoint_->post_receive(tag, memory->head, memory->data, token);
    if (status.is_ok()) posted_.emplace(token.value, std::move(memory));
  }

  /// A frame for a receive that is posted: a true one where the program does not say otherwise.
  void arrive() {
    const std::uint8_t which = program_.next();
    const std::uint8_t detail = program_.next();
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < wire_->receives.size(); ++i) {
      if (wire_->receives[i].tag != kReportTag) open.push_back(i);
    }
    if (open.empty()) return;
    const std::size_t at = open[which % open.size()];
    const Wire::Post post = wire_->receives[at];
    wire_->receives.erase(wire_->receives.begin() + static_cast<std::ptrdiff_t>(at));
    const std::size_t room = post.first.size() + post.second.size();
    const std::size_t bytes = (detail & 4u) != 0 ? room - kFrameBytes : program_.next() % (room - kFrameBytes + 1);
    std::vector<std::byte> body(bytes, static_cast<std::byte>(detail));
    deliver(post, frame_of(detail, FrameKind::kMessage, body), body);
  }

  void report() {
    const auto found = std::find_if(wire_->receives.begin(), wire_->receives.end(),
                                    [](const Wire::Post& post) { return post.tag == kReportTag; });
    if (found == wire_->receives.end()) return;
    const Wire::Post post = *found;
    wire_->receives.erase(found);
    const std::uint8_t detail = program_.next();
    Report report;
    report.asks = (detail & 4u) != 0;
    for (std::uint8_t i = detail >> 3 & 3u; i > 0; --i) {
      const std::uint64_t first = program_.next();
      report.arrived.push_back({first, first + program_.next() - 1});
    }
    for (std::uint8_t i = detail >> 5 & 3u; i > 0; --i) {
      const std::uint8_t tag = program_.next();
      report.damaged.push_back({tag == 0 ? kControlTag.value : 100u + (tag & 3u), program_.next(), program_.next()});
    }
    std::vector<std::byte> body = encode(report);
    const Frame frame = frame_of(detail, FrameKind::kReport, body);
    deliver(post, frame, body);
  }

  Frame frame_of(std::uint8_t detail, FrameKind kind, std::span<const std::byte> body) {
    Frame frame;
    frame.kind = kind;
    frame.job_id = kJob;
    frame.sender = detail & 3u;  // One of them is nobody.
    frame.bytes = static_cast<std::uint32_t>(body.size());
    frame.number = kind == FrameKind::kMessage ? program_.next() : 0;
    frame.oldest = program_.next();
    frame.below = program_.next();
    frame.seen = std::uint64_t{program_.next()} << (program_.next() & 63u);
    frame.data_crc32c = wire::crc32c(body);
    return frame;
  }

  void deliver(const Wire::Post& post, const Frame& frame, std::vector<std::byte> body) {
    const auto head = encode(frame);
    std::vector<std::byte> all(head.begin(), head.end());
    all.insert(all.end(), body.begin(), body.end());
    for (int count = program_.next() & 3; count > 0; --count) {
      const std::size_t at = program_.next();
      all[at % all.size()] ^= static_cast<std::byte>(program_.next());
    }
    all.resize(std::min(all.size(), post.first.size() + post.second.size()));
    const std::size_t first = std::min(all.size(), post.first.size());
    std::copy_n(all.begin(), first, post.first.begin());
    std::copy(all.begin() + static_cast<std::ptrdiff_t>(first), all.end(), post.second.begin());
    wire_->done.push_back({post.token, CompletionKind::kReceive, all.size(), {}});
  }

  void sent(std::size_t which, const Status& status) {
    if (wire_->sends.empty()) return;
    const auto at = wire_->sends.begin() + static_cast<std::ptrdiff_t>(which % wire_->sends.size());
    touch(at->borrowed);
    wire_->done.push_back({at->token, CompletionKind::kSend, at->bytes.size(), status});
    wire_->sends.erase(at);
  }

  void poll() {
    std::array<Completion, 16> batch;
    for (std::size_t count = 0; (count = endpoint_->poll(batch)) > 0;) {
      // The memory goes with it: the sanitizer finds whoever touches it later.
      for (std::size_t i = 0; i < count; ++i) HERRING_REQUIRE(posted_.erase(batch[i].token.value) == 1);
    }
  }

  void end() {
    wire_->is_full = false;
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) endpoint_->remove_peer(PeerId{peer});
    for (int round = 0; round < 100 && !posted_.empty(); ++round) {
      std::vector<std::uint64_t> tokens;
      for (const auto& [token, memory] : posted_) tokens.push_back(token);
      for (const std::uint64_t token : tokens) endpoint_->cancel_receive(Token{token});
      now_ += std::chrono::seconds(1);
      poll();
    }
    HERRING_REQUIRE(posted_.empty());
  }

  Program program_;
  Instant now_{std::chrono::hours(1)};
  std::map<std::uint64_t, std::unique_ptr<Memory>> posted_;  // By the user's token. Outlives the endpoint.
  std::unique_ptr<CheckedEndpoint> endpoint_;
  Wire* wire_ = nullptr;
  std::uint64_t next_token_ = 1;
};

}  // namespace
}  // namespace herring::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace herring::fuzz;
  check_codec(std::as_bytes(std::span(bytes, size)));
  Harness({bytes, size}).run();
  return 0;
}

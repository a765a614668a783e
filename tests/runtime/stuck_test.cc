// A link that stays cut, and a transport that never gives the memory of a transfer back: the user's call ends all the
// same.
#include <gtest/gtest.h>
#include <poll.h>

#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/status.h"
#include "runtime/progress.h"
#include "transport/strict_endpoint.h"

namespace herring::runtime {
namespace {

using namespace std::chrono_literals;

/// Takes everything; nothing ever leaves it, and nothing comes.
class CutEndpoint final : public transport::Endpoint {
 public:
  const transport::Address& address() const override { return address_; }
  std::string description() const override { return "cut"; }
  void add_peer(PeerId, std::span<const std::byte>) override {}
  void remove_peer(PeerId) override {}
  Status post_send(PeerId, Tag, std::span<const std::byte>, std::span<const std::byte>, Token token) override {
    sends_.push_back(token);
    return {};
  }
  Status post_receive(Tag tag, std::span<std::byte>, std::span<std::byte>, Token token) override {
    if (tag == kControlTag) controls_.insert(token.value);
    return {};
  }
  void cancel_receive(Token token) override {
    cancelled_.push_back({token, transport::CompletionKind::kCancelled, 0, {}});
    if (!controls_.contains(token.value)) return;
    // Its user closes it: that ends what it has sent too.
    for (const Token send : std::exchange(sends_, {})) {
      cancelled_.push_back({send, transport::CompletionKind::kSend, 0, Status(Code::kPeerLost, "closed")});
    }
  }
  std::size_t poll(std::span<transport::Completion> completions) override {
    std::size_t count = 0;
    for (; count < completions.size() && !cancelled_.empty(); ++count) {
      completions[count] = cancelled_.front();
      cancelled_.pop_front();
    }
    return count;
  }
  void wait(Instant, std::span<const int> also) override {
    std::vector<pollfd> items;
    for (const int descriptor : also) items.push_back({descriptor, POLLIN, 0});
    if (cancelled_.empty()) ::poll(items.data(), items.size(), 10);
  }
  bool prepare_wait(std::vector<int>&, Instant&) override { return cancelled_.empty(); }
  void wake() override {}
  void shut_down() override {
    sends_.clear();
    cancelled_.clear();
  }

 private:
  transport::Address address_;
  std::deque<transport::Completion> cancelled_;
  std::vector<Token> sends_;
  std::set<std::uint64_t> controls_;
};

class StuckTest : public testing::Test {
 protected:
  StuckTest() {
    config_.servers = 1;
    config_.dead_after_s = 0.2;
    config_.intra_node = Switch::kOff;
    const std::vector<Member> workers{{Role::kWorker, 0, 1, "id-a", "a"}, {Role::kWorker, 1, 2, "id-b", "b"}};
    const std::vector<Member> servers{{Role::kServer, 0, 3, "id-c", "c"}};
    placement_ = make_placement(config_, workers, servers);
    ProgressOptions options;
    options.config = config_;
    options.placement = &placement_;
    // A card that wants memory registered: nothing may be released while a post uses it, however things end.
    options.endpoint = std::make_unique<transport::StrictEndpoint>(std::make_unique<CutEndpoint>(), domain_);
    options.peer_endpoint = std::make_unique<transport::StrictEndpoint>(std::make_unique<CutEndpoint>(), domain_);
    options.memory = &domain_;
    progress_ = std::make_unique<Progress>(std::move(options));
    group_ = std::make_shared<Group>();
    const std::vector<std::uint32_t> all{0, 1};
    group_->route = make_route(placement_, config_, 0, all);
  }

  std::shared_ptr<PendingWork> reduce(std::span<float> values, Duration timeout,
                                      std::shared_ptr<LateMemory> late = nullptr) {
    auto operation = std::make_shared<PendingOperation>();
    operation->group = group_;
    operation->op = group_->next_op++;
    operation->descriptor.dims = 1;
    operation->descriptor.shape[0] = values.size();
    operation->descriptor.op_bytes = values.size_bytes();
    operation->output = std::as_writable_bytes(values);
    operation->input = operation->output;
    operation->deadline = std::chrono::steady_clock::now() + timeout;
    operation->late = std::move(late);
    operation->work = std::make_shared<PendingWork>(callbacks_, progress_->seat());
    progress_->submit(operation);
    return operation->work;
  }

  PendingMessage message_to_other(std::span<const float> values, Duration timeout) {
    PendingMessage message;
    message.route = {group_, &group_->route};
    message.peer = 1;
    message.is_send = true;
    message.tag = 7;
    message.data = std::as_bytes(values);
    message.deadline = std::chrono::steady_clock::now() + timeout;
    message.work = std::make_shared<MessageWork>(callbacks_);
    return message;
  }

  Config config_;
  memory::Domain domain_;
  Placement placement_;
  std::shared_ptr<CallbackPool> callbacks_ = std::make_shared<CallbackPool>();
  std::shared_ptr<Group> group_;
  std::unique_ptr<Progress> progress_;
};

TEST_F(StuckTest, AnOperationOnALinkThatStaysCutFails) {
  std::vector<float> values(16, 1);
  const auto work = reduce(values, 100ms);
  ASSERT_TRUE(work->wait(std::chrono::steady_clock::now() + 5s)) << "it waits for the transport for ever";
  EXPECT_EQ(work->status().code(), Code::kTimeout) << work->status().to_string();
  const auto later = reduce(values, 10s);
  ASSERT_TRUE(later->wait(std::chrono::steady_clock::now() + 5s));
  EXPECT_FALSE(later->status().is_ok()) << "its endpoint is closed";
}

TEST_F(StuckTest, AMessageOnALinkThatStaysCutFails) {
  std::vector<float> values(100'000, 1);
  const PendingMessage message = message_to_other(values, 100ms);
  progress_->submit(message);
  ASSERT_TRUE(message.work->wait(std::chrono::steady_clock::now() + 5s));
  EXPECT_EQ(message.work->status().code(), Code::kTimeout) << message.work->status().to_string();
}

/// The thread that moves data asks it how much is there.
class AskedMemory final : public LateMemory {
 public:
  explicit AskedMemory(std::function<void()> on_asked) : on_asked_(std::move(on_asked)) {}
  std::uint64_t bytes_there() const override {
    on_asked_();
    return 0;
  }
  Status status() const override { return {}; }
  void on_result(std::uint64_t, std::uint64_t) override {}

 private:
  std::function<void()> on_asked_;
};

/// An operation, a message, and who waits for the end of a group.
TEST_F(StuckTest, AFailureLosesNothingThatCameInTheSameTurn) {
  std::vector<float> values(16, 1);
  std::promise<void> held;
  std::promise<void> all_asked;
  std::once_flag once;
  const auto hold = [&] {
    held.set_value();
    all_asked.get_future().wait();
  };
  const auto first = reduce(values, 60s, std::make_shared<AskedMemory>([&] { std::call_once(once, hold); }));
  held.get_future().wait();
  const auto failing =
      reduce(values, 60s, std::make_shared<AskedMemory>([] { throw std::runtime_error("no memory"); }));
  const auto behind = reduce(values, 60s);
  const PendingMessage message = message_to_other(values, 60s);
  progress_->submit(message);
  std::packaged_task<void()> wait([closed = progress_->close_group(GroupId{7})] { closed->wait(); });
  const std::future<void> closed = wait.get_future();
  std::thread(std::move(wait)).detach();
  all_asked.set_value();
  const Instant limit = std::chrono::steady_clock::now() + 5s;
  for (const auto& work : {first, failing, behind}) {
    ASSERT_TRUE(work->wait(limit));
    EXPECT_NE(work->status().message().find("no memory"), std::string::npos) << work->status().to_string();
  }
  EXPECT_TRUE(message.work->wait(limit));
  EXPECT_EQ(closed.wait_until(limit), std::future_status::ready) << "who left a group waits for ever";
  EXPECT_TRUE(progress_->drain(limit)) << "something is counted as under way";
}

TEST_F(StuckTest, WhoShutsDownWithSomethingUnderWaySaysSo) {
  std::vector<float> values(16, 1);
  testing::internal::CaptureStderr();
  EXPECT_TRUE(progress_->drain(std::chrono::steady_clock::now() + 5s)) << "there is nothing to wait for";
  const auto work = reduce(values, 60s);
  EXPECT_FALSE(progress_->drain(std::chrono::steady_clock::now() + 50ms));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("herring[rank 0] warning: this process shuts down although operations or messages of it have not "
                      "ended after "),
            std::string::npos)
      << said;
}

TEST(Overdue, CountsOnlyWhileSomebodyLooks) {
  Overdue overdue(Instant{} + 10s);
  EXPECT_FALSE(overdue.look(Instant{} + 9s, 1s));
  EXPECT_FALSE(overdue.look(Instant{} + 100s, 1s)) << "its process had been stopped";
  EXPECT_FALSE(overdue.look(Instant{} + 101s, 1s));
  EXPECT_TRUE(overdue.look(Instant{} + 102s, 1s));
}

}  // namespace
}  // namespace herring::runtime

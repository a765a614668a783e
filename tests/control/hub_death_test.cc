#include <sys/socket.h>

#include <algorithm>

#include "control/hub.h"
#include "control/hub_test_support.h"

/// Processes that die or stop, and connections that mean harm.
namespace herring::control {
namespace {

using namespace test;

/// Starts `hub` in this process and worker 1 in a forked one; joins as worker 0.
class HubDeath : public ::testing::Test {
 protected:
  void start(Duration dead_after) {
    // The child is forked before this process has threads; it learns the port through a pipe.
    int pipes[2];
    ASSERT_EQ(::pipe(pipes), 0);
    child_ = std::make_unique<Child>([pipes] {
      std::uint16_t port = 0;
      if (::read(pipes[0], &port, sizeof(port)) != sizeof(port)) return;
      ::close(pipes[1]);
      HubClient client(member_options(port, Role::kWorker, 1, 3), in(30s));
      wait_to_be_killed();
    });
    auto options = hub_options(3);
    options.heartbeat = 50ms;
    options.dead_after = dead_after;
    hub_ = std::make_unique<Hub>(options);
    const std::uint16_t port = hub_->port();
    ASSERT_EQ(::write(pipes[1], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
    ::close(pipes[0]);
    ::close(pipes[1]);
    in_parallel(2, [&](std::size_t i) {
      const std::uint32_t rank = i == 0 ? 0 : 2;
      (i == 0 ? zero_ : two_) = std::make_unique<HubClient>(member_options(port, Role::kWorker, rank, 3), in(20s));
    });
  }
  void TearDown() override {
    child_.reset();
    zero_.reset();
    two_.reset();
    hub_.reset();
  }

  std::unique_ptr<Child> child_;
  std::unique_ptr<Hub> hub_;
  std::unique_ptr<HubClient> zero_;
  std::unique_ptr<HubClient> two_;
};

TEST_F(HubDeath, AKilledMemberIsKnownToAllWithinASecond) {
  ASSERT_NO_FATAL_FAILURE(start(30s));  // So long that only the closed connection can tell.
  const auto pid = static_cast<std::uint32_t>(child_->pid());
  const Instant begin = Clock::now();
  child_->signal(SIGKILL);
  for (HubClient* member : {zero_.get(), two_.get()}) {
    const HubEvent event = next_event(*member);
    EXPECT_EQ(event.kind, HubEvent::Kind::kLost) << event.reason;
    EXPECT_EQ(event.member.rank, 1u);
    EXPECT_EQ(event.member.pid, pid);
    EXPECT_NE(event.reason.find("connection"), std::string::npos) << event.reason;
  }
  EXPECT_LT(Clock::now() - begin, kSanitized ? 5s : 1s);
}

TEST_F(HubDeath, AStoppedMemberIsKnownAfterDeadAfter) {
  ASSERT_NO_FATAL_FAILURE(start(kSanitized ? 1500ms : 500ms));
  const Instant begin = Clock::now();
  child_->signal(SIGSTOP);
  for (HubClient* member : {zero_.get(), two_.get()}) {
    const HubEvent event = next_event(*member, 10s);
    EXPECT_EQ(event.kind, HubEvent::Kind::kLost) << event.reason;
    EXPECT_EQ(event.member.rank, 1u);
    EXPECT_NE(event.reason.find("silent for"), std::string::npos) << event.reason;
  }
  EXPECT_GT(Clock::now() - begin, 400ms);
}

TEST(HubLoss, AKilledAndAStoppedHubAreNoticed) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const std::uint16_t port = free_port();
    Child process([port] {
      auto options = hub_options(2);
      options.ports = {port};
      options.dead_after = kSanitized ? 1500ms : 500ms;
      Hub hub(options);
      HubClient zero(member_options(port, Role::kWorker, 0, 2), in(30s));
      wait_to_be_killed();
    });
    HubClient one(member_options(port, Role::kWorker, 1, 2), in(30s));
    process.signal(signal);
    const HubEvent event = next_event(one, 10s);
    EXPECT_EQ(event.kind, HubEvent::Kind::kHubLost) << event.reason;
    EXPECT_NE(event.reason.find(signal == SIGKILL ? "worker 0's process died" : "silent for"), std::string::npos)
        << event.reason;
    const Status status = thrown_by([&] { one.exchange("x", {}, in(5s)); });
    EXPECT_EQ(status.code(), Code::kPeerLost);
  }
}

TEST(HubLoss, AForkedChildDoesNotSpeakForItsParent) {
  Hub hub(hub_options(2));
  auto members = join_all(hub.port(), 2);
  Child child([&] { members[1].reset(); });
  EXPECT_EQ(child.wait(), 0);
  // The parent's member is as alive as before.
  in_parallel(2, [&](std::size_t i) { EXPECT_EQ(members[i]->exchange("x", {}, in(10s)).size(), 2u); });
  HubEvent event;
  EXPECT_FALSE(members[0]->next_event(event)) << event.reason;
}

/// A raw connection to a hub.
UniqueFd connect_raw(std::uint16_t port) {
  std::string why;
  UniqueFd fd = connect_to("127.0.0.1", port, in(5s), why);
  EXPECT_TRUE(fd) << why;
  return fd;
}

/// True where the hub closes the connection in time.
bool is_closed_by_hub(const UniqueFd& fd, Duration patience) {
  const Instant deadline = in(patience);
  std::array<std::byte, 4096> buffer;
  for (;;) {
    if (!wait_for(fd.get(), 1 /* POLLIN */, deadline)) return false;
    const ssize_t got = ::recv(fd.get(), buffer.data(), buffer.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
  }
}

void send_raw(const UniqueFd& fd, std::span<const std::byte> bytes) {
  EXPECT_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

std::vector<std::byte> raw_frame(FrameType type, std::span<const std::byte> body) {
  const FrameHead head = frame_head(type, body.size());
  std::vector<std::byte> bytes(head.begin(), head.end());
  bytes.resize(kFrameHeaderBytes);
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

TEST(HubStrangers, GarbageAndHugeLengthsAreDroppedAtOnce) {
  Hub hub(hub_options(1));
  const UniqueFd http = connect_raw(hub.port());
  send_raw(http, bytes_of("GET / HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(is_closed_by_hub(http, 3s));

  const UniqueFd huge = connect_raw(hub.port());
  auto frame = raw_frame(FrameType::kHello, {});
  for (std::size_t i = 8; i < 12; ++i) frame[i] = std::byte{0xff};
  send_raw(huge, frame);
  EXPECT_TRUE(is_closed_by_hub(huge, 3s));

  const UniqueFd impatient = connect_raw(hub.port());  // An exchange without a handshake.
  send_raw(impatient, raw_frame(FrameType::kExchange, encode(Exchange{"x", {}})));
  EXPECT_TRUE(is_closed_by_hub(impatient, 3s));
  EXPECT_TRUE(eventually([&] { return hub.counters().bad_strangers == 3; }));

  const HubClient client(member_options(hub.port(), Role::kWorker, 0, 1), in(20s));
  EXPECT_EQ(client.job_id(), 4711u) << "the hub is as good as before";
}

TEST(HubStrangers, AJoinWithoutTheSecretIsDropped) {
  Hub hub(hub_options(1));
  FrameSocket socket(connect_raw(hub.port()));
  socket.send(FrameType::kHello, make_body(encode(Hello{})));
  ASSERT_TRUE(socket.flush());
  Frame frame;
  while (socket.next(frame) == FrameReader::Result::kNeedMore) {
    ASSERT_TRUE(wait_for(socket.fd(), 1, in(5s)));
    ASSERT_TRUE(socket.receive());
  }
  ASSERT_EQ(frame.type, FrameType::kChallenge);
  const auto challenge = decode_challenge(frame.body);
  ASSERT_TRUE(challenge);
  const SessionKeys keys = session_keys("a guess", transcript(Hello{}, *challenge));
  socket.seal_with(keys.to_hub, keys.to_member);
  socket.send(FrameType::kJoin, make_body(encode(Join{{Role::kWorker, 0, 1, "h", "n"}, 1, 0})));
  ASSERT_TRUE(socket.flush());
  bool open = true;
  while (open && wait_for(socket.fd(), 1, in(5s))) open = socket.receive();
  EXPECT_FALSE(open);
  EXPECT_EQ(hub.counters().joined, 0u);
  EXPECT_TRUE(eventually([&] { return hub.counters().bad_strangers == 1; }));
}

TEST(HubStrangers, OtherVersionsAndFeaturesAreToldBothValues) {
  Hub hub(hub_options(1));
  for (const Hello& hello : {Hello{99, kProtocolFeatures, {}}, Hello{kProtocolVersion, 1024, {}}}) {
    FrameSocket socket(connect_raw(hub.port()));
    socket.send(FrameType::kHello, make_body(encode(hello)));
    ASSERT_TRUE(socket.flush());
    Frame frame;
    while (socket.next(frame) == FrameReader::Result::kNeedMore) {
      ASSERT_TRUE(wait_for(socket.fd(), 1, in(5s)));
      ASSERT_TRUE(socket.receive());
    }
    ASSERT_EQ(frame.type, FrameType::kRefuse);
    const auto refuse = decode_refuse(frame.body);
    ASSERT_TRUE(refuse);
    EXPECT_EQ(refuse->code, hello.version == 99 ? RefuseCode::kVersion : RefuseCode::kFeatures);
    EXPECT_NE(refuse->text.find(hello.version == 99 ? "99" : "1024"), std::string::npos) << refuse->text;
    const std::string ours = std::to_string(hello.version == 99 ? kProtocolVersion : kProtocolFeatures);
    EXPECT_NE(refuse->text.find("the hub " + ours), std::string::npos) << refuse->text;
  }
}

TEST(HubStrangers, AFloodOfSilentConnectionsKeepsNobodyOut) {
  Hub hub(hub_options(1));
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 700; ++i) flood.push_back(connect_raw(hub.port()));
  const auto half = raw_frame(FrameType::kHello, encode(Hello{}));
  send_raw(flood.back(), std::span(half).first(20));  // A slow one: the rest never comes.
  const HubClient client(member_options(hub.port(), Role::kWorker, 0, 1), in(20s));
  EXPECT_EQ(client.job_id(), 4711u);
  EXPECT_TRUE(eventually([&] { return hub.counters().slow_strangers >= 100; }));
  const auto closed =
      std::count_if(flood.begin(), flood.end(), [](const UniqueFd& fd) { return is_closed_by_hub(fd, 0s); });
  EXPECT_GE(closed, 100) << "some make room";
}

TEST(HubStrangers, ASlowHandshakeIsCutOff) {
  Hub hub(hub_options(1));
  const UniqueFd slow = connect_raw(hub.port());
  const auto hello = raw_frame(FrameType::kHello, encode(Hello{}));
  send_raw(slow, std::span(hello).first(33));
  EXPECT_TRUE(is_closed_by_hub(slow, 15s));
  EXPECT_TRUE(eventually([&] { return hub.counters().slow_strangers == 1; }));
}

}  // namespace
}  // namespace herring::control

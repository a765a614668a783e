// Who connects to an endpoint's port without being of the job: what a user would lose is a job that crashes, hangs,
// fills its memory, or takes a stranger's bytes for a gradient.
#include <thread>

#include "raw_peer.h"

namespace herring::tcp {
namespace {

class Strangers : public TcpTest {
 protected:
  Options counting() {
    Options options = test_options();
    counters_ = options.strangers;
    options.on_stranger = [this](const std::string& text) { told_.push_back(text); };
    return options;
  }

  std::shared_ptr<StrangerCounters> counters_;
  std::vector<std::string> told_;
};

TEST_F(Strangers, WhoSendsJunkIsCountedNamedAndDropped) {
  open(2, counting());
  for (const std::size_t bytes : {std::size_t{52}, std::size_t{5000}}) {
    RawPeer stranger(*parties_[1].endpoint);
    ASSERT_TRUE(stranger.write(pattern(bytes, 3)));
    EXPECT_TRUE(stranger.is_closed(drive()));
  }
  EXPECT_EQ(counters_->bad.value(), 2u);
  ASSERT_EQ(told_.size(), 2u);
  EXPECT_NE(told_[0].find("127.0.0.1:"), std::string::npos) << told_[0];
  expect_alive(1);
}

TEST_F(Strangers, WhoSaysNothingOrHalfIsDroppedInTime) {
  Options options = counting();
  options.handshake_limit_s = 0.2;
  open(2, options);
  RawPeer silent(*parties_[1].endpoint);
  RawPeer slow(*parties_[1].endpoint);
  const HelloBytes hello = slow.hello();
  ASSERT_TRUE(slow.write(std::span(hello).first(30)));
  EXPECT_TRUE(silent.is_closed(drive()));
  EXPECT_TRUE(slow.is_closed(drive()));
  EXPECT_EQ(counters_->slow.value(), 2u);
  expect_alive(1);
}

TEST_F(Strangers, AnotherKeyComesNotInAndTheSendSaysWhatToLookAt) {
  Options theirs = counting();
  theirs.connect_timeout_s = 0.3;
  open(2, theirs);
  Options other = test_options(1);
  other.connect_timeout_s = 0.3;
  Party outsider{open_endpoint(other)};
  outsider.endpoint->add_peer(PeerId{1}, parties_[1].endpoint->address());
  const Bytes data = pattern(100, 1);
  Bytes in(100);
  ASSERT_TRUE(receive(1, 7, in, 7).is_ok());
  ASSERT_TRUE(outsider.endpoint->post_send(PeerId{1}, Tag{7}, data, {}, Token{1}).is_ok());
  ASSERT_TRUE(until([&] {
    outsider.poll();
    return outsider.is_done(1);
  }));
  const Status& status = outsider.done.at(1).status;
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_NE(status.message().find("HERRING_SECRET"), std::string::npos) << status.to_string();
  EXPECT_FALSE(parties_[1].is_done(7));
  EXPECT_GT(counters_->failed.value(), 0u);
  expect_alive(2);
}

TEST_F(Strangers, WhoHasNoKeyCannotEnterWhateverTheProof) {
  open(2, counting());
  RawPeer liar(*parties_[1].endpoint);
  EXPECT_FALSE(liar.enter(test_key(9), drive())) << "the endpoint's own proof is of another key";
  RawPeer guess(*parties_[1].endpoint);
  ASSERT_TRUE(guess.write(guess.hello()));
  ASSERT_EQ(guess.read(kAnswerBytes, drive()).size(), kAnswerBytes);
  ASSERT_TRUE(guess.write(pattern(kProofBytes, 5)));
  EXPECT_TRUE(guess.is_closed(drive()));
  EXPECT_EQ(counters_->failed.value(), 1u);
  expect_alive(1);
}

TEST_F(Strangers, AHandshakeThatWasRecordedIsOfNoUseAgain) {
  open(2, counting());
  RawPeer member(*parties_[1].endpoint);
  ASSERT_TRUE(member.write(member.hello()));
  const Bytes answer = member.read(kAnswerBytes, drive());
  const ProofBytes proof = make_proof(test_key(), member.hello(), std::span(answer).first(sizeof(Nonce)));
  ASSERT_TRUE(member.write(proof));
  ASSERT_TRUE(until([&] { return parties_[1].endpoint->stats().connections == 1; }));
  RawPeer replay(*parties_[1].endpoint);
  ASSERT_TRUE(replay.write(member.hello()));
  ASSERT_EQ(replay.read(kAnswerBytes, drive()).size(), kAnswerBytes);
  ASSERT_TRUE(replay.write(proof));
  EXPECT_TRUE(replay.is_closed(drive()));
  EXPECT_EQ(counters_->failed.value(), 1u);
  EXPECT_EQ(parties_[1].endpoint->stats().connections, 1u);
}

TEST_F(Strangers, AFloodKeepsNoMemberOut) {
  Options options = counting();
  options.most_strangers = 8;
  open(2, options);
  std::vector<std::unique_ptr<RawPeer>> flood;
  for (int i = 0; i < 60; ++i) {
    flood.push_back(std::make_unique<RawPeer>(*parties_[1].endpoint));
    poll_all();
  }
  expect_alive(1);
  EXPECT_GE(counters_->slow.value(), 60u - 8u);
}

TEST_F(Strangers, AMemberThatSendsWhatIsNoFrameLosesItsConnectionAlone) {
  open(2, counting());
  RawPeer member(*parties_[1].endpoint);
  ASSERT_TRUE(member.enter(test_key(), drive()));
  ASSERT_TRUE(member.write(pattern(200, 1)));
  EXPECT_TRUE(member.is_closed(drive()));
  expect_alive(1);
}

TEST_F(Strangers, WhoSendsHalfAMessageAndEndsFailsItsReceive) {
  open(2, counting());
  int token = 100;
  for (const int way : {0, 2, 3}) {  // Not 1: the system drops what was not read before a reset.
    const bool is_reset = (way & 1) != 0, is_read_before = (way & 2) != 0;
    const std::uint64_t read = parties_[1].endpoint->stats().bytes_received;
    RawPeer member(*parties_[1].endpoint);
    ASSERT_TRUE(member.enter(test_key(), drive()));
    Bytes in(1000), other(1000);
    const auto landing = static_cast<std::uint64_t>(++token);
    const auto waiting = static_cast<std::uint64_t>(++token);
    ASSERT_TRUE(receive(1, landing, in, landing).is_ok());
    ASSERT_TRUE(receive(1, waiting, other, waiting).is_ok());
    ASSERT_TRUE(member.announce(Tag{landing}, 1000));
    ASSERT_TRUE(member.write(pattern(400, 1)));
    if (is_read_before) {
      ASSERT_TRUE(until([&] { return parties_[1].endpoint->stats().bytes_received == read + 416; }));
    }
    if (is_reset) {
      member.reset();
    } else {
      member.end_sending();
    }
    ASSERT_TRUE(until([&] { return parties_[1].is_done(landing); }, 5)) << "way " << way;
    EXPECT_EQ(parties_[1].done.at(landing).status.code(), Code::kPeerLost);
    EXPECT_FALSE(parties_[1].is_done(waiting)) << "nobody sends it yet";
    const Bytes late = pattern(1000, 2);
    ASSERT_TRUE(send(0, 1, waiting, late, waiting).is_ok());
    EXPECT_TRUE(until([&] { return parties_[1].is_done(waiting) && parties_[0].is_done(waiting); }));
  }
}

/// The sender is stopped, or its link is cut: whoever owns the memory gets it back all the same.
TEST_F(Strangers, AReceiveIsTakenBackThoughItsSenderStoppedInTheMiddle) {
  open(2, counting());
  RawPeer member(*parties_[1].endpoint);
  ASSERT_TRUE(member.enter(test_key(), drive()));
  auto in = std::make_unique<Bytes>(1000);
  ASSERT_TRUE(receive(1, 5, *in, 5).is_ok());
  ASSERT_TRUE(member.announce(Tag{5}, 1000));
  ASSERT_TRUE(member.write(pattern(400, 1)));
  ASSERT_TRUE(until([&] { return parties_[1].endpoint->stats().bytes_received == 416; }));
  const auto start = std::chrono::steady_clock::now();
  parties_[1].endpoint->cancel_receive(Token{5});
  ASSERT_TRUE(until([&] { return parties_[1].is_done(5); }));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_EQ(parties_[1].done.at(5).kind, transport::CompletionKind::kCancelled);
  in.reset();  // Sanitizers watch.
  // The rest comes after all, and what follows it arrives.
  Bytes next(10);
  ASSERT_TRUE(receive(1, 6, next, 6).is_ok());
  ASSERT_TRUE(member.write(pattern(600, 2)));
  ASSERT_TRUE(member.announce(Tag{6}, 10));
  ASSERT_TRUE(member.write(pattern(10, 3)));
  ASSERT_TRUE(until([&] { return parties_[1].is_done(6); }));
  EXPECT_EQ(next, pattern(10, 3));
}

}  // namespace
}  // namespace herring::tcp

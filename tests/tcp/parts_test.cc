// The parts of an endpoint that know no socket.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "raw_peer.h"
#include "tcp/interface.h"
#include "tcp/receive_table.h"

namespace herring::tcp {
namespace {

TEST(ReceiveTable, FindsByTagAndTokenAsAListWould) {
  std::mt19937_64 random(7);
  ReceiveTable table;
  std::multimap<std::uint64_t, std::uint64_t> posted;  // Tag, token.
  std::uint64_t next = 0;
  for (int step = 0; step < 40'000; ++step) {
    const std::uint64_t tag = random() % 700;
    switch (random() % 5) {
      case 0:
      case 1:
        if (posted.size() > 1500) break;
        table.add(Tag{tag}, {}, Token{next});
        posted.emplace(tag, next++);
        break;
      case 2: {
        Receive* const taken = table.take(Tag{tag});
        const auto [begin, end] = posted.equal_range(tag);
        ASSERT_EQ(taken != nullptr, begin != end);
        if (taken == nullptr) break;
        const auto same = std::find_if(begin, end, [&](const auto& one) { return one.second == taken->token.value; });
        ASSERT_NE(same, end) << "a receive of another tag, or one that is gone";
        posted.erase(same);
        table.remove(taken);
        break;
      }
      default: {
        if (next == 0) break;
        const Token token{random() % next};
        Receive* const found = table.find(token);
        const auto known =
            std::find_if(posted.begin(), posted.end(), [&](const auto& one) { return one.second == token.value; });
        ASSERT_EQ(found != nullptr, known != posted.end());
        if (found == nullptr || random() % 2 == 0) break;
        ASSERT_EQ(found->tag.value, known->first);
        table.unlink_tag(found);
        table.remove(found);
        posted.erase(known);
      }
    }
    ASSERT_EQ(table.size(), posted.size());
  }
}

Candidate on(const std::string& name, const char* address, const char* mask) {
  Candidate candidate;
  candidate.name = name;
  for (auto [text, to] : {std::pair{address, &candidate.socket}, std::pair{mask, &candidate.mask}}) {
    auto* in = reinterpret_cast<sockaddr_in*>(&to->storage);
    in->sin_family = AF_INET;
    EXPECT_EQ(inet_pton(AF_INET, text, &in->sin_addr), 1);
  }
  return candidate;
}

TEST(Interface, IsInTheNetworkOfItsMask) {
  const Candidate own = on("eth0", "10.1.2.3", "255.255.0.0");
  EXPECT_TRUE(is_in_network(on("", "10.1.200.1", "255.0.0.0").socket, own));
  EXPECT_FALSE(is_in_network(on("", "10.2.2.3", "255.255.0.0").socket, own));
  Candidate unknown = own;
  unknown.mask = {};
  EXPECT_FALSE(is_in_network(own.socket, unknown));
  SocketAddress six;
  six.storage.ss_family = AF_INET6;
  EXPECT_FALSE(is_in_network(six, own));
}

TEST(Interface, TheNumberPicksTheFirstAndAnAbsentOneIsNamed) {
  Options options;
  EXPECT_EQ(choose_candidates(options).size(), 1u);
  options.interfaces = {"127.0.0.1", "lo"};
  options.number = 3;
  const std::vector<Candidate> candidates = choose_candidates(options);
  ASSERT_EQ(candidates.size(), 2u);
  EXPECT_EQ(candidates.front().name, "lo");
  options.interfaces = {"lo", "nosuchif0"};
  try {
    choose_candidates(options);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("nosuchif0"), std::string::npos);
  }
}

TEST(Handshake, OneWrongBitAnywhereIsRefused) {
  const Digest key = test_key();
  const Instance target = fresh_nonce(), own = fresh_nonce();
  const HelloBytes hello = make_hello(fresh_nonce(), target, own);
  const Nonce nonce = fresh_nonce();
  const AnswerBytes answer = make_answer(key, hello, nonce);
  const ProofBytes proof = make_proof(key, hello, nonce);
  EXPECT_EQ(check_hello(hello, target), own);
  EXPECT_TRUE(check_answer(key, hello, answer));
  EXPECT_TRUE(check_proof(key, hello, nonce, proof));
  EXPECT_FALSE(check_hello(hello, own)) << "for another endpoint";
  for (std::size_t bit = 0; bit < 8 * kAnswerBytes; ++bit) {
    AnswerBytes wrong = answer;
    wrong[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(check_answer(key, hello, wrong)) << bit;
  }
  for (std::size_t bit = 0; bit < 8 * kProofBytes; ++bit) {
    ProofBytes wrong = proof;
    wrong[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(check_proof(key, hello, nonce, wrong)) << bit;
  }
  for (std::size_t bit = 0; bit < 8 * kHelloBytes; ++bit) {
    HelloBytes wrong = hello;
    wrong[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(check_proof(key, wrong, nonce, proof)) << bit;
  }
  EXPECT_FALSE(check_proof(key, hello, nonce, std::span(answer).subspan(sizeof(Nonce)))) << "one end's for the other's";
}

TEST(Frame, AStreamOutOfStepIsSeen) {
  const FrameBytes frame = encode_frame({Tag{0x1234}, 77});
  ASSERT_TRUE(decode_frame(frame));
  EXPECT_EQ(decode_frame(frame)->bytes, 77u);
  EXPECT_EQ(decode_frame(frame)->tag, Tag{0x1234});
  for (std::size_t bit = 0; bit < 8 * kFrameBytes; ++bit) {
    FrameBytes wrong = frame;
    wrong[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_FALSE(decode_frame(wrong)) << bit;
  }
  EXPECT_FALSE(decode_frame(FrameBytes{}));
}

Candidate candidate(const std::string& name, const std::string& text, int family = AF_INET) {
  Candidate one;
  one.name = name;
  one.text = text;
  one.socket.storage.ss_family = static_cast<sa_family_t>(family);
  one.facts.loopback = name == "lo";
  return one;
}

TEST(Interfaces, ChoosesAsAmongLibfabricsProviders) {
  std::vector<std::string> reasons;
  auto lo = candidate("lo", "127.0.0.1");
  auto eth = candidate("eth0", "192.0.2.2");
  auto bridge = candidate("docker0", "172.17.0.1");
  bridge.facts.local_only = true;
  auto routed = candidate("eth1", "192.0.2.9");
  routed.facts.default_route = true;
  auto down = candidate("eth2", "192.0.2.7");
  down.facts.up = false;
  auto six = candidate("eth0", "2001:db8::1", AF_INET6);
  EXPECT_EQ(choose(std::vector{lo, bridge, eth, six}, "", reasons), 2);
  EXPECT_EQ(choose(std::vector{lo, eth, routed, down}, "", reasons), 2);
  EXPECT_EQ(choose(std::vector{lo, down}, "", reasons), 0);
  EXPECT_EQ(choose(std::vector{lo, down}, "eth2", reasons), 1);
  EXPECT_EQ(choose(std::vector{lo, eth, six}, "2001:db8::1", reasons), 2);
  EXPECT_EQ(choose(std::vector{lo, eth}, "ib0", reasons), -1);
  for (const std::string& reason : reasons) EXPECT_NE(reason.find("ib0"), std::string::npos) << reason;
}

}  // namespace
}  // namespace herring::tcp

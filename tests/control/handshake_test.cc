#include "control/handshake.h"

#include <gtest/gtest.h>

/// What a user would lose: a job that strangers can join, or whose processes do not find out why they cannot.
namespace herring::control {
namespace {

Nonce nonce_of(int value) {
  Nonce nonce;
  nonce.fill(static_cast<std::byte>(value));
  return nonce;
}

Frame frame_of(FrameType type, const SharedBody& body) {
  Frame frame;
  frame.type = type;
  frame.body.assign(body->bytes().begin(), body->bytes().end());
  return frame;
}

const HostFacts kHost{"the rendezvous", "secret", 29500, true};

TEST(Handshake, BothEndsProveThatTheyHaveTheSecretAndHaveTheSameKeys) {
  Guest guest("secret", nonce_of(1));
  const auto answer = answer_hello(frame_of(FrameType::kHello, guest.hello()), kHost, nonce_of(2));
  ASSERT_TRUE(answer && answer->keys);
  ASSERT_EQ(guest.judge(frame_of(answer->type, answer->body)), Guest::Verdict::kProven);
  EXPECT_EQ(guest.keys().to_hub, answer->keys->to_hub);
  EXPECT_EQ(guest.keys().to_member, answer->keys->to_member);
  EXPECT_NE(guest.keys().to_hub, guest.keys().to_member);
  EXPECT_EQ(guest.challenge().master_port, 29500);
  EXPECT_TRUE(guest.challenge().started);
}

TEST(Handshake, AnotherSecretIsFoundByTheGuestWhichLearnsWhoseHostItIs) {
  Guest guest("another secret", nonce_of(1));
  const auto answer = answer_hello(frame_of(FrameType::kHello, guest.hello()), kHost, nonce_of(2));
  ASSERT_TRUE(answer);
  EXPECT_EQ(guest.judge(frame_of(answer->type, answer->body)), Guest::Verdict::kOtherSecret);
  EXPECT_EQ(guest.challenge().master_port, 29500);
}

TEST(Handshake, AnAnswerToAnotherHelloProvesNothing) {
  Guest first("secret", nonce_of(1));
  Guest second("secret", nonce_of(3));
  const auto answer = answer_hello(frame_of(FrameType::kHello, first.hello()), kHost, nonce_of(2));
  ASSERT_TRUE(answer);
  EXPECT_EQ(second.judge(frame_of(answer->type, answer->body)), Guest::Verdict::kOtherSecret);
}

TEST(Handshake, OtherVersionsAndFeaturesAreToldBothValuesAndGetNoKeys) {
  for (const Hello& hello : {Hello{99, kProtocolFeatures, {}}, Hello{kProtocolVersion, 1024, {}}}) {
    const auto answer = answer_hello(frame_of(FrameType::kHello, make_body(encode(hello))), kHost, nonce_of(2));
    ASSERT_TRUE(answer);
    EXPECT_FALSE(answer->keys);
    Guest guest("secret", nonce_of(1));
    ASSERT_EQ(guest.judge(frame_of(answer->type, answer->body)), Guest::Verdict::kRefused);
    const std::string& text = guest.refusal().text;
    const bool is_version = hello.version == 99;
    EXPECT_EQ(guest.refusal().code, is_version ? RefuseCode::kVersion : RefuseCode::kFeatures);
    EXPECT_NE(text.find(is_version ? "99" : "1024"), std::string::npos) << text;
    const std::string ours = std::to_string(is_version ? kProtocolVersion : kProtocolFeatures);
    EXPECT_NE(text.find("the rendezvous " + ours), std::string::npos) << text;
  }
}

TEST(Handshake, WhatAnybodyCouldSayEndsNoGuest) {
  // A refusal before there are keys may be anybody's: only what keeps both from speaking at all is believed.
  Guest guest("secret", nonce_of(1));
  const auto refuse = make_body(encode(Refuse{RefuseCode::kRankTaken, "somebody has your place"}));
  EXPECT_EQ(guest.judge(frame_of(FrameType::kRefuse, refuse)), Guest::Verdict::kNoHost);
  EXPECT_EQ(guest.judge(frame_of(FrameType::kWelcome, make_body({}))), Guest::Verdict::kNoHost);
  EXPECT_EQ(guest.judge(frame_of(FrameType::kChallenge, make_body({}))), Guest::Verdict::kNoHost);
}

TEST(Handshake, OnlyAHelloIsAnswered) {
  EXPECT_FALSE(answer_hello(frame_of(FrameType::kJoin, make_body(encode(Hello{}))), kHost, nonce_of(2)));
  EXPECT_FALSE(answer_hello(frame_of(FrameType::kHello, make_body({})), kHost, nonce_of(2)));
}

}  // namespace
}  // namespace herring::control

#include "tcp/handshake.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

namespace herring::tcp {
namespace {

constexpr std::array<std::byte, 4> kHelloMagic{std::byte{'H'}, std::byte{'T'}, std::byte{'C'}, std::byte{1}};

Digest mac(const Digest& key, std::string_view label, const HelloBytes& hello, std::span<const std::byte> nonce) {
  std::vector<std::byte> text;
  const auto add = [&text](std::span<const std::byte> bytes) { text.insert(text.end(), bytes.begin(), bytes.end()); };
  add(std::as_bytes(std::span(label)));
  add(hello);
  add(nonce);
  return hmac_sha256(key, text);
}

}  // namespace

Nonce fresh_nonce() {
  Nonce nonce{};
  random_bytes(nonce);
  return nonce;
}

HelloBytes make_hello(const Nonce& nonce, const Instance& target, const Instance& own) {
  HelloBytes hello{};
  auto next = std::copy(kHelloMagic.begin(), kHelloMagic.end(), hello.begin());
  next = std::copy(nonce.begin(), nonce.end(), next);
  next = std::copy(target.begin(), target.end(), next);
  std::copy(own.begin(), own.end(), next);
  return hello;
}

std::optional<Instance> check_hello(std::span<const std::byte> hello, const Instance& own) {
  constexpr std::size_t kTarget = kHelloMagic.size() + sizeof(Nonce);
  if (hello.size() != kHelloBytes || !std::equal(kHelloMagic.begin(), kHelloMagic.end(), hello.begin()))
    return std::nullopt;
  if (!std::equal(own.begin(), own.end(), hello.begin() + kTarget)) return std::nullopt;
  Instance who{};
  std::memcpy(who.data(), &hello[kTarget + sizeof(Instance)], who.size());
  return who;
}

AnswerBytes make_answer(const Digest& key, const HelloBytes& hello, const Nonce& nonce) {
  AnswerBytes answer{};
  const Digest proof = mac(key, "accept", hello, nonce);
  std::copy(proof.begin(), proof.end(), std::copy(nonce.begin(), nonce.end(), answer.begin()));
  return answer;
}

bool check_answer(const Digest& key, const HelloBytes& hello, std::span<const std::byte> answer) {
  return answer.size() == kAnswerBytes &&
         equal_constant_time(answer.subspan(sizeof(Nonce)), mac(key, "accept", hello, answer.first(sizeof(Nonce))));
}

ProofBytes make_proof(const Digest& key, const HelloBytes& hello, std::span<const std::byte> nonce) {
  return mac(key, "connect", hello, nonce);
}

bool check_proof(const Digest& key, const HelloBytes& hello, const Nonce& nonce, std::span<const std::byte> proof) {
  return equal_constant_time(proof, mac(key, "connect", hello, nonce));
}

}  // namespace herring::tcp

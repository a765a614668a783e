#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>

#include "core/hmac.h"
#include "tcp/address.h"

/// How the two ends of a connection prove to each other that they have the job's key, before anything else is read:
///
///   who connects:  Hello   "HTC" 1, nonce, instance that it looks for, own instance
///   who accepts:   Answer  nonce, mac(key, "accept", Hello, nonce)
///   who connects:  Proof   mac(key, "connect", Hello, Answer's nonce)
///
/// Nonces are fresh, so nothing that was recorded can be played again. Pure: knows no socket.
namespace herring::tcp {

using Nonce = std::array<std::byte, 16>;

inline constexpr std::size_t kHelloBytes = 4 + sizeof(Nonce) + 2 * sizeof(Instance);
inline constexpr std::size_t kAnswerBytes = sizeof(Nonce) + sizeof(Digest);
inline constexpr std::size_t kProofBytes = sizeof(Digest);
using HelloBytes = std::array<std::byte, kHelloBytes>;
using AnswerBytes = std::array<std::byte, kAnswerBytes>;
using ProofBytes = Digest;

Nonce fresh_nonce();

HelloBytes make_hello(const Nonce& nonce, const Instance& target, const Instance& own);
/// Who connects; nothing where it is no Hello, or not for this endpoint.
std::optional<Instance> check_hello(std::span<const std::byte> hello, const Instance& own);

AnswerBytes make_answer(const Digest& key, const HelloBytes& hello, const Nonce& nonce);
bool check_answer(const Digest& key, const HelloBytes& hello, std::span<const std::byte> answer);

/// `nonce` is the Answer's.
ProofBytes make_proof(const Digest& key, const HelloBytes& hello, std::span<const std::byte> nonce);
bool check_proof(const Digest& key, const HelloBytes& hello, const Nonce& nonce, std::span<const std::byte> proof);

}  // namespace herring::tcp

#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "core/operation.h"
#include "core/status.h"
#include "wire/action.h"

/// The n-ary reduction: reads n streams once, writes the result, in a fixed order of summation.
///
/// Order: a balanced binary tree over the inputs. tree(lo, hi) = tree(lo, lo + h) op tree(lo + h, hi) with h the
/// largest power of two smaller than hi - lo. Any aligned run of 2^k inputs is therefore a subtree, so reducing it
/// beforehand changes no bit of a float32/float64 result. float16 and bfloat16 are accumulated in float32 over the
/// whole tree and rounded once to nearest even; averaging divides before that rounding. Integers wrap; an integer
/// average truncates toward zero. bool: sum, max and bor are OR, product, min and band are AND, bxor is XOR. min and
/// max propagate NaN. Bitwise operators on floating types, and bool averages, are refused by check().
namespace herring::server {

enum class Isa { kScalar, kNeon, kAvx2, kAvx512 };

/// Whether this processor has it.
bool is_available(Isa isa) noexcept;
/// The best this processor has.
Isa best_isa() noexcept;
std::string_view name(Isa isa) noexcept;

/// Ok, or kInvalidArgument naming the type and the operator that do not go together.
Status check(ReduceSpec spec);

/// outputs[k][:] = reduction of inputs, for every k (usually one; several where each rank of a host keeps its own
/// copy). All spans have the same size, a multiple of the element size, at any alignment; at least one input. An output
/// may be the same span as one of the inputs, never a partial overlap. One input is copied (and divided). Throws
/// Error(kInvalidArgument) for what breaks this. Bit-identical for every Isa.
void reduce(ReduceSpec spec, std::span<const std::span<const std::byte>> inputs,
            std::span<const std::span<std::byte>> outputs, Isa isa = best_isa());

/// What a ReduceAction asks for; its loan is the caller's to look after. Comes back with the inputs that are not
/// finite, where it asks for them: then nothing is summed.
std::vector<NotFiniteInput> carry_out(const ReduceAction& action, Isa isa = best_isa());

}  // namespace herring::server

#include "server/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include "core/copy.h"
#include "core/finite.h"
#include "server/reduce_internal.h"

namespace herring::server {
namespace {

using internal::Kernel;
using internal::KernelCall;
using internal::KernelSet;

/// Bytes of elements of each input per round. Where one kernel takes all inputs, this only bounds what is in cache when
/// it is copied to further outputs. Larger trees keep one scratch block per level of the recursion in L1.
constexpr std::size_t kStreamBlockBytes = 16384;
constexpr std::size_t kTreeBlockBytes = 4096;
constexpr std::size_t kFewInputs = 16;    // So many need no memory.
constexpr std::size_t kLargestScale = 2;  // float32 accumulators of 16-bit elements.
/// Levels of a tree over as many inputs as a 64-bit count can name.
constexpr std::size_t kMaxRights = 64;

/// The default floating-point environment for as long as it lives: a caller that flushes denormals or rounds otherwise
/// must not get other bits than the other workers.
class DefaultFloatEnvironment final {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefault = 0x1F80;  // Nearest even, denormals kept, exceptions masked.
  static constexpr unsigned kFlags = 0x3F;      // What happened so far; not a setting.
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

bool is_float(DataType dtype) {
  return dtype == DataType::kFloat32 || dtype == DataType::kFloat64 || dtype == DataType::kFloat16 ||
         dtype == DataType::kBFloat16;
}

KernelSet kernels_for(ReduceSpec spec, Isa isa) {
  switch (isa) {
    case Isa::kNeon:
      return internal::neon_kernels(spec);
    case Isa::kAvx2:
      return internal::avx2_kernels(spec);
    case Isa::kAvx512:
      return internal::avx512_kernels(spec);
    case Isa::kScalar:
      break;
  }
  return {};
}

/// The kernel that reduces so many inputs at once, or null.
Kernel find_kernel(const KernelSet& kernels, std::size_t inputs) {
  return inputs <= internal::kRegisterInputs ? kernels.by_count[inputs - 1] : nullptr;
}

/// One block of one reduction with vector kernels.
class BlockTree final {
 public:
  BlockTree(const KernelSet& kernels, std::span<const std::byte* const> inputs, std::uint32_t average_over)
      : kernels_(kernels), inputs_(inputs), average_over_(average_over) {}

  /// out[0, bytes) = finished tree over all inputs at [offset, offset + bytes).
  void reduce(std::size_t offset, std::size_t bytes, std::byte* out) const {
    evaluate({0, inputs_.size(), offset, bytes}, {}, out, true);
  }

 private:
  struct Part {
    std::size_t first;
    std::size_t count;
    std::size_t offset;
    std::size_t bytes;
  };

  /// out = ((tree(part) op rights[last]) op ...) op rights[0].
  void evaluate(const Part& part, std::span<const std::byte* const> rights, std::byte* out, bool finish) const {
    const Kernel kernel = find_kernel(kernels_, part.count);
    if (kernel == nullptr) return split(part, rights, out, finish);
    kernel({.inputs = inputs_.data() + part.first,
            .offset = part.offset,
            .bytes = part.bytes,
            .rights = rights.data(),
            .right_count = rights.size(),
            .out = out,
            .finish = finish,
            .average_over = average_over_});
  }

  /// Right half into scratch, then the left half with it as one more right operand. A function of its own, so that
  /// leaves have no scratch on the stack.
  [[gnu::noinline]] void split(const Part& part, std::span<const std::byte* const> rights, std::byte* out,
                               bool finish) const {
    alignas(64) std::byte scratch[kTreeBlockBytes * kLargestScale];
    std::array<const std::byte*, kMaxRights> more;
    std::ranges::copy(rights, more.begin());
    more[rights.size()] = scratch;
    const std::size_t half = std::bit_floor(part.count - 1);
    evaluate({part.first + half, part.count - half, part.offset, part.bytes}, {}, scratch, false);
    evaluate({part.first, half, part.offset, part.bytes}, {more.data(), rights.size() + 1}, out, finish);
  }

  const KernelSet& kernels_;
  std::span<const std::byte* const> inputs_;
  std::uint32_t average_over_;
};

[[noreturn]] void refuse(const std::string& what) { throw Error(Code::kInvalidArgument, "reduce: " + what); }

bool overlap_partly(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.empty() || b.empty() || a.data() == b.data()) return false;  // Sizes are equal.
  const auto first = std::bit_cast<std::uintptr_t>(a.data());
  const auto second = std::bit_cast<std::uintptr_t>(b.data());
  return first < second ? second - first < a.size() : first - second < b.size();
}

void check_spans(DataType dtype, std::span<const std::span<const std::byte>> inputs,
                 std::span<const std::span<std::byte>> outputs) {
  if (inputs.empty()) refuse("no inputs");
  if (outputs.empty()) refuse("no outputs");
  const std::size_t bytes = inputs[0].size();
  if (bytes % element_bytes(dtype) != 0) {
    refuse(std::to_string(bytes) + " bytes are no whole number of " + std::string(name(dtype)) + " elements");
  }
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    if (inputs[i].size() != bytes) {
      refuse("input " + std::to_string(i) + " has " + std::to_string(inputs[i].size()) + " bytes, input 0 has " +
             std::to_string(bytes));
    }
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (outputs[k].size() != bytes) {
      refuse("output " + std::to_string(k) + " has " + std::to_string(outputs[k].size()) + " bytes, input 0 has " +
             std::to_string(bytes));
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (overlap_partly(inputs[i], outputs[k])) {
        refuse("output " + std::to_string(k) + " overlaps a part of input " + std::to_string(i) +
               "; it may be the same memory or none of it");
      }
    }
    for (std::size_t i = 0; i < k; ++i) {
      if (overlap_partly(outputs[i], outputs[k])) {
        refuse("output " + std::to_string(k) + " overlaps a part of output " + std::to_string(i));
      }
    }
  }
}

}  // namespace

bool is_available(Isa isa) noexcept {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kNeon:
      return false;
    case Isa::kAvx2:
#if defined(__clang__)
      return __builtin_cpu_supports("avx2");  // Clang 14 cannot ask for F16C; every processor with AVX2 has it.
#else
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#elif defined(__aarch64__)
  return isa == Isa::kScalar || isa == Isa::kNeon;
#else
  return isa == Isa::kScalar;
#endif
}

Isa best_isa() noexcept {
  if (is_available(Isa::kAvx512)) return Isa::kAvx512;
  if (is_available(Isa::kAvx2)) return Isa::kAvx2;
  return is_available(Isa::kNeon) ? Isa::kNeon : Isa::kScalar;
}

std::string_view name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Status check(ReduceSpec spec) {
  const auto bad = [](const std::string& what) { return Status(Code::kInvalidArgument, "reduce: " + what); };
  const auto op = [&] { return std::string(name(spec.op)); };
  if (element_bytes(spec.dtype) == 0) {
    return bad("data type number " + std::to_string(static_cast<unsigned>(spec.dtype)) + " is unknown");
  }
  if (name(spec.op) == "unknown")
    return bad("operator number " + std::to_string(static_cast<unsigned>(spec.op)) + " is unknown");
  const bool bitwise = spec.op == ReduceOp::kBand || spec.op == ReduceOp::kBor || spec.op == ReduceOp::kBxor;
  if (bitwise && is_float(spec.dtype)) {
    return bad(op() + " needs integers or bool, not " + std::string(name(spec.dtype)));
  }
  if (spec.op == ReduceOp::kAverage && spec.dtype == DataType::kBool) {
    return bad("a bool has no average; use sum (or) or convert to a number");
  }
  if (spec.average_over == 0) return bad("an average over 0 ranks");
  if (spec.average_over > 1 && spec.op != ReduceOp::kAverage) {
    return bad("only average divides; " + op() + " came with a division by " + std::to_string(spec.average_over));
  }
  return Status::ok();
}

void reduce(ReduceSpec spec, std::span<const std::span<const std::byte>> inputs,
            std::span<const std::span<std::byte>> outputs, Isa isa) {
  check(spec).or_throw();
  check_spans(spec.dtype, inputs, outputs);
  if (!is_available(isa)) {
    refuse("this processor has no " + std::string(name(isa)) + "; set HERRING_SIMD=auto");
  }
  const std::size_t total = inputs[0].size();
  if (inputs.size() == 1 && spec.average_over == 1) {
    for (const std::span<std::byte> output : outputs) copy_bytes(inputs[0], output);
    return;
  }
  const DefaultFloatEnvironment environment;
  std::array<const std::byte*, kFewInputs> few;
  std::vector<const std::byte*> many(inputs.size() > few.size() ? inputs.size() : 0);
  const std::span<const std::byte*> pointers = std::span(many.empty() ? few.data() : many.data(), inputs.size());
  std::ranges::transform(inputs, pointers.begin(), [](const auto& input) { return input.data(); });
  const KernelSet kernels = kernels_for(spec, isa);
  const BlockTree vectors(kernels, pointers, spec.average_over);
  const bool needs_scratch = find_kernel(kernels, inputs.size()) == nullptr;
  const std::size_t block_bytes = needs_scratch ? kTreeBlockBytes : kStreamBlockBytes;
  const bool divide = spec.average_over > 1 && !is_float(spec.dtype);
  for (std::size_t offset = 0; offset < total;) {
    std::size_t bytes = std::min(block_bytes, total - offset);
    std::byte* out = outputs[0].data() + offset;
    if (isa != Isa::kScalar && bytes >= internal::kVectorStepBytes) {
      bytes -= bytes % internal::kVectorStepBytes;
      vectors.reduce(offset, bytes, out);
    } else {
      internal::reduce_scalar(spec, pointers.data(), pointers.size(), offset, bytes, out);
    }
    if (divide) internal::divide_integers(spec.dtype, out, bytes, spec.average_over);
    for (const std::span<std::byte> output : outputs.subspan(1)) {
      copy_bytes({out, bytes}, output.subspan(offset, bytes));
    }
    offset += bytes;
  }
}

std::vector<NotFiniteInput> carry_out(const ReduceAction& action, Isa isa) {
  std::vector<NotFiniteInput> found;
  for (std::uint32_t k = 0; action.check_finite && k < action.inputs.size(); ++k) {
    if (const auto element = find_not_finite(action.spec.dtype, action.inputs[k])) found.push_back({k, *element});
  }
  if (found.empty()) reduce(action.spec, action.inputs, action.outputs, isa);
  return found;
}

}  // namespace herring::server

#pragma once

#include <type_traits>

namespace herring::cuda {

/// Whether a function of ours and one of theirs take as many arguments, each of the same size, and either both pointers
/// or neither; and return as much.
template <class Ours, class Theirs>
inline constexpr bool kSameShape = false;
template <class Result, class... Ours, class TheirResult, class... Theirs>
requires(sizeof...(Ours) ==
         sizeof...(Theirs)) inline constexpr bool kSameShape<Result(Ours...), TheirResult(Theirs...)> =
    sizeof(Result) == sizeof(TheirResult) &&
    ((sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>)&&...);

}  // namespace herring::cuda

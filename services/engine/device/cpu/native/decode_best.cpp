#include "decoder.h"

namespace catenary {

bool Following::resolve(const DecodeArguments& arguments, std::vector<int64_t>* given) const {
  if (rows < 1 || rows > arguments.rows) return false;
  given->assign(arguments.tokens, arguments.tokens + arguments.rows);
  for (int64_t row = 0; row < arguments.rows; ++row) {
    if (last_rows[row] < 0 || last_rows[row] >= places) return false;
    int64_t& token = (*given)[static_cast<size_t>(row)];
    if (token < 0) token = last_tokens[last_rows[row]];
  }
  return true;
}

Fault Decoder::decode_best(const DecodeArguments& arguments, const Following& following, void* hidden) {
  DecodeArguments known = arguments;
  if (!following.resolve(arguments, &given_)) return Fault::kToken;
  known.tokens = given_.data();
  Fault fault = decode(known, hidden);
  if (fault == Fault::kNone) fault = choose(hidden, following.rows, following.tokens, following.scores);
  if (fault != Fault::kNone) return fault;
  for (int64_t row = 0; row < following.rows; ++row) {
    following.last_tokens[following.last_rows[row]] = following.tokens[row];
  }
  return Fault::kNone;
}

}  // namespace catenary

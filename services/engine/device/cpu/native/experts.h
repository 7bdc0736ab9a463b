// Mixtures of experts in the place of a gated MLP.
//
// A router scores the experts of each token; the tokens of each expert are then computed together, so that
// its weights are read once, and what a token's experts give is added up in the order in which the token
// chose them. So a token's bits depend on nothing but the token.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels.h"
#include "linear.h"
#include "team.h"

namespace catenary {

struct Experts {
  // Hidden size to `count` scores; never quantized.
  Linear router;
  // [count] each, of one shape and kind: gated, hidden size to twice the expert's, and back.
  const Linear* gate_up;
  const Linear* down;
  int32_t count;
  int32_t per_token;
  // 1: the weights of a token's experts are made to sum to one.
  int32_t normalize;
  // 1: they are then rounded to brain floats.
  int32_t rounded;
};

// What experts do to the residual stream float32 [rows, stride]: their sum, of normed rows, is added to it,
// times the factor, and normed once more before where post_norm is not null.
struct MixtureCall {
  const Experts* experts;
  float* residual;
  int64_t stride;
  const float* norm;
  const float* post_norm;
  float eps;
  float factor;
  Activation activation;
};

// What a team works in. One layer at a time.
class Mixture {
 public:
  // Room for `rows`. Throws std::bad_alloc; what follows does not.
  void make_room(const Experts& experts, int64_t rows);

  // owns: what each of the team's threads works in alone.
  void compute(Team& team, std::vector<Own>& owns, const MixtureCall& call, int64_t rows);

  int64_t bytes() const;

 private:
  // An expert that tokens chose: its rows among those sorted by expert, and where its pieces of products
  // begin.
  struct Active {
    int32_t expert;
    int64_t start;
    int64_t rows;
    Pieces up;
    Pieces down;
    int64_t first_up;
    int64_t first_down;
  };

  void compute_part(Team& team, std::vector<Own>& owns, const MixtureCall& call, int64_t rows);
  void choose(const Experts& experts, int64_t row);
  void sort(const Experts& experts, int64_t rows, int threads);
  void add_up(const MixtureCall& call, int64_t row, float* scratch);

  Buffer scores_, routed_, normed_, normed_scales_, sorted_, sorted_scales_, inner_;
  Buffer closing_, closing_scales_, outs_;
  // Of each row its experts, their weights, and which of the sorted rows they are; of each sorted row which
  // it was.
  std::vector<int32_t> chosen_;
  std::vector<float> weights_;
  std::vector<int64_t> places_;
  std::vector<int64_t> sources_;
  // Sorted rows before each expert's.
  std::vector<int64_t> starts_;
  std::vector<Active> active_;
  int64_t up_pieces_ = 0;
  int64_t down_pieces_ = 0;
};

}  // namespace catenary

// Loads a TorchScript file of `regimen export format=torchscript` and answers for one picture of zeros.
//   load_torchscript model.ts CHANNELS HEIGHT WIDTH
#include <torch/script.h>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: load_torchscript model.ts CHANNELS HEIGHT WIDTH\n";
    return 2;
  }
  try {
    torch::jit::Module model = torch::jit::load(argv[1]);
    model.eval();
    torch::InferenceMode guard;
    // Give your own data here: floats after the transforms that export.json names.
    torch::Tensor input =
        torch::zeros({1, std::atol(argv[2]), std::atol(argv[3]), std::atol(argv[4])});
    torch::Tensor logits = model.forward({input}).toTensor().contiguous();
    std::cout.precision(9);
    for (int64_t i = 0; i < logits.numel(); ++i) {
      std::cout << logits.data_ptr<float>()[i] << "\n";
    }
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << "\n";
    return 1;
  }
}

module @test {
  func.func public @main(%0: tensor<4xbf16>, %1: tensor<4x2xbf16>) -> (tensor<2xbf16>) {
    %2 = "stablehlo.dot_general"(%0, %1) {dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = [], rhs_batching_dimensions = [], lhs_contracting_dimensions = [0], rhs_contracting_dimensions = [0]>, precision_config = [#stablehlo<precision DEFAULT>, #stablehlo<precision DEFAULT>]} : (tensor<4xbf16>, tensor<4x2xbf16>) -> tensor<2xbf16> loc("mlp")
    %3 = "stablehlo.logistic"(%2) : (tensor<2xbf16>) -> tensor<2xbf16> loc("mlp")
    %4 = "stablehlo.multiply"(%2, %3) : (tensor<2xbf16>, tensor<2xbf16>) -> tensor<2xbf16> loc("mlp")
    "func.return"(%4) : (tensor<2xbf16>) -> ()
  }
}

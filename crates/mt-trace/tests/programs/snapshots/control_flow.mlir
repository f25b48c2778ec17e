module @test {
  func.func public @main(%0: tensor<4xf32>, %1: tensor<i32>) -> (tensor<4xf32>) {
    %2 = "stablehlo.sine"(%0) : (tensor<4xf32>) -> tensor<4xf32>
    %3 = "stablehlo.constant"() {value = dense<2.0e0> : tensor<f32>} : () -> tensor<f32>
    %4 = "stablehlo.broadcast_in_dim"(%3) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4xf32>
    %5 = "stablehlo.multiply"(%0, %4) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    %6 = "stablehlo.case"(%1) ({
      "stablehlo.return"(%2) : (tensor<4xf32>) -> ()
    }, {
      "stablehlo.return"(%5) : (tensor<4xf32>) -> ()
    }) : (tensor<i32>) -> (tensor<4xf32>)
    %7 = "stablehlo.while"(%6) ({
    ^bb0(%8: tensor<4xf32>):
      %9 = "stablehlo.constant"() {value = dense<0.0e0> : tensor<f32>} : () -> tensor<f32>
      %13 = "stablehlo.reduce"(%8, %9) ({ ^bb0(%10: tensor<f32>, %11: tensor<f32>): %12 = "stablehlo.add"(%10, %11) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%12) : (tensor<f32>) -> () }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %14 = "stablehlo.constant"() {value = dense<1.0e1> : tensor<f32>} : () -> tensor<f32>
      %15 = "stablehlo.compare"(%13, %14) {comparison_direction = #stablehlo<comparison_direction LT>} : (tensor<f32>, tensor<f32>) -> tensor<i1>
      "stablehlo.return"(%15) : (tensor<i1>) -> ()
    }, {
    ^bb0(%16: tensor<4xf32>):
      %17 = "stablehlo.add"(%16, %0) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      "stablehlo.return"(%17) : (tensor<4xf32>) -> ()
    }) : (tensor<4xf32>) -> (tensor<4xf32>)
    %21 = "stablehlo.sort"(%7) ({ ^bb0(%18: tensor<f32>, %19: tensor<f32>): %20 = "stablehlo.compare"(%18, %19) {comparison_direction = #stablehlo<comparison_direction GT>, compare_type = #stablehlo<comparison_type TOTALORDER>} : (tensor<f32>, tensor<f32>) -> tensor<i1> "stablehlo.return"(%20) : (tensor<i1>) -> () }) {dimension = 0 : i64, is_stable = true} : (tensor<4xf32>) -> (tensor<4xf32>)
    "func.return"(%21) : (tensor<4xf32>) -> ()
  }
}

module @test {
  func.func public @main(%0: tensor<4xf32>, %1: tensor<3x4xf32> {tf.aliasing_output = 1 : i32}) -> (tensor<f32>, tensor<3x4xf32>) {
    %2 = "stablehlo.constant"() {value = dense<1.0e0> : tensor<f32>} : () -> tensor<f32>
    %3 = "stablehlo.constant"() {value = dense<0.0> : tensor<3x4xf32>} : () -> tensor<3x4xf32>
    %4 = "stablehlo.constant"() {value = dense<0.0> : tensor<3x4xf32>} : () -> tensor<3x4xf32>
    %5 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
    %6, %7, %8, %9 = "stablehlo.while"(%5, %0, %3, %4) ({
    ^bb0(%10: tensor<i32>, %11: tensor<4xf32>, %12: tensor<3x4xf32>, %13: tensor<3x4xf32>):
      %14 = "stablehlo.constant"() {value = dense<3> : tensor<i32>} : () -> tensor<i32>
      %15 = "stablehlo.compare"(%10, %14) {comparison_direction = #stablehlo<comparison_direction LT>} : (tensor<i32>, tensor<i32>) -> tensor<i1>
      "stablehlo.return"(%15) : (tensor<i1>) -> ()
    }, {
    ^bb0(%16: tensor<i32>, %17: tensor<4xf32>, %18: tensor<3x4xf32>, %19: tensor<3x4xf32>):
      %20 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
      %21 = "stablehlo.dynamic_slice"(%1, %16, %20) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
      %22 = "stablehlo.reshape"(%21) : (tensor<1x4xf32>) -> tensor<4xf32>
      %23 = "stablehlo.multiply"(%17, %22) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layer")
      %24 = "stablehlo.sine"(%23) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
      %25 = "stablehlo.reshape"(%17) : (tensor<4xf32>) -> tensor<1x4xf32>
      %26 = "stablehlo.dynamic_update_slice"(%18, %25, %16, %20) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32>
      %27 = "stablehlo.reshape"(%23) : (tensor<4xf32>) -> tensor<1x4xf32>
      %28 = "stablehlo.dynamic_update_slice"(%19, %27, %16, %20) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32>
      %29 = "stablehlo.constant"() {value = dense<1> : tensor<i32>} : () -> tensor<i32>
      %30 = "stablehlo.add"(%16, %29) : (tensor<i32>, tensor<i32>) -> tensor<i32>
      "stablehlo.return"(%30, %24, %26, %28) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>) -> ()
    }) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>) -> (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>)
    %31 = "stablehlo.constant"() {value = dense<0.0e0> : tensor<f32>} : () -> tensor<f32>
    %35 = "stablehlo.reduce"(%7, %31) ({ ^bb0(%32: tensor<f32>, %33: tensor<f32>): %34 = "stablehlo.add"(%32, %33) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%34) : (tensor<f32>) -> () }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %36 = "stablehlo.broadcast_in_dim"(%2) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4xf32> loc("gradient")
    %37 = "stablehlo.constant"() {value = dense<0.0> : tensor<3x4xf32>} : () -> tensor<3x4xf32> loc("gradient")
    %38 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
    %39, %40, %41 = "stablehlo.while"(%38, %36, %37) ({
    ^bb0(%42: tensor<i32>, %43: tensor<4xf32>, %44: tensor<3x4xf32>):
      %45 = "stablehlo.constant"() {value = dense<3> : tensor<i32>} : () -> tensor<i32>
      %46 = "stablehlo.compare"(%42, %45) {comparison_direction = #stablehlo<comparison_direction LT>} : (tensor<i32>, tensor<i32>) -> tensor<i1> loc("gradient")
      "stablehlo.return"(%46) : (tensor<i1>) -> ()
    }, {
    ^bb0(%47: tensor<i32>, %48: tensor<4xf32>, %49: tensor<3x4xf32>):
      %50 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
      %51 = "stablehlo.constant"() {value = dense<2> : tensor<i32>} : () -> tensor<i32>
      %52 = "stablehlo.subtract"(%51, %47) : (tensor<i32>, tensor<i32>) -> tensor<i32> loc("gradient")
      %53 = "stablehlo.dynamic_slice"(%8, %52, %50) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %54 = "stablehlo.reshape"(%53) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %55 = "stablehlo.dynamic_slice"(%1, %52, %50) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %56 = "stablehlo.reshape"(%55) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %57 = "stablehlo.dynamic_slice"(%9, %52, %50) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %58 = "stablehlo.reshape"(%57) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %59 = "stablehlo.cosine"(%58) : (tensor<4xf32>) -> tensor<4xf32> loc("gradient/layer")
      %60 = "stablehlo.multiply"(%48, %59) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient/layer")
      %61 = "stablehlo.multiply"(%60, %56) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient/layer")
      %62 = "stablehlo.multiply"(%54, %60) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient/layer")
      %63 = "stablehlo.reshape"(%62) : (tensor<4xf32>) -> tensor<1x4xf32> loc("gradient")
      %64 = "stablehlo.dynamic_update_slice"(%49, %63, %52, %50) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32> loc("gradient")
      %65 = "stablehlo.constant"() {value = dense<1> : tensor<i32>} : () -> tensor<i32>
      %66 = "stablehlo.add"(%47, %65) : (tensor<i32>, tensor<i32>) -> tensor<i32> loc("gradient")
      "stablehlo.return"(%66, %61, %64) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) -> ()
    }) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) -> (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) loc("gradient")
    %67 = "stablehlo.subtract"(%1, %41) : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x4xf32>
    "func.return"(%35, %67) : (tensor<f32>, tensor<3x4xf32>) -> ()
  }
}

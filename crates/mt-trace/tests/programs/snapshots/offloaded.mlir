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
      %23 = "stablehlo.tanh"(%17) : (tensor<4xf32>) -> tensor<4xf32>
      %24 = "stablehlo.multiply"(%23, %22) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      %25 = "stablehlo.sine"(%24) : (tensor<4xf32>) -> tensor<4xf32>
      %26 = "stablehlo.custom_call"(%24) {call_target_name = "annotate_device_placement", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
      %27 = "stablehlo.custom_call"(%17) {call_target_name = "annotate_device_placement", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<4xf32>) -> tensor<4xf32>
      %28 = "stablehlo.reshape"(%27) : (tensor<4xf32>) -> tensor<1x4xf32>
      %29 = "stablehlo.dynamic_update_slice"(%18, %28, %16, %20) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32>
      %30 = "stablehlo.reshape"(%26) : (tensor<4xf32>) -> tensor<1x4xf32>
      %31 = "stablehlo.dynamic_update_slice"(%19, %30, %16, %20) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32>
      %32 = "stablehlo.constant"() {value = dense<1> : tensor<i32>} : () -> tensor<i32>
      %33 = "stablehlo.add"(%16, %32) : (tensor<i32>, tensor<i32>) -> tensor<i32>
      "stablehlo.return"(%33, %25, %29, %31) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>) -> ()
    }) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>) -> (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>, tensor<3x4xf32>)
    %34 = "stablehlo.constant"() {value = dense<0.0e0> : tensor<f32>} : () -> tensor<f32>
    %38 = "stablehlo.reduce"(%7, %34) ({ ^bb0(%35: tensor<f32>, %36: tensor<f32>): %37 = "stablehlo.add"(%35, %36) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%37) : (tensor<f32>) -> () }) {dimensions = array<i64: 0>} : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %39 = "stablehlo.broadcast_in_dim"(%2) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4xf32> loc("gradient")
    %40 = "stablehlo.constant"() {value = dense<0.0> : tensor<3x4xf32>} : () -> tensor<3x4xf32> loc("gradient")
    %41 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
    %42, %43, %44 = "stablehlo.while"(%41, %39, %40) ({
    ^bb0(%45: tensor<i32>, %46: tensor<4xf32>, %47: tensor<3x4xf32>):
      %48 = "stablehlo.constant"() {value = dense<3> : tensor<i32>} : () -> tensor<i32>
      %49 = "stablehlo.compare"(%45, %48) {comparison_direction = #stablehlo<comparison_direction LT>} : (tensor<i32>, tensor<i32>) -> tensor<i1> loc("gradient")
      "stablehlo.return"(%49) : (tensor<i1>) -> ()
    }, {
    ^bb0(%50: tensor<i32>, %51: tensor<4xf32>, %52: tensor<3x4xf32>):
      %53 = "stablehlo.constant"() {value = dense<0> : tensor<i32>} : () -> tensor<i32>
      %54 = "stablehlo.constant"() {value = dense<2> : tensor<i32>} : () -> tensor<i32>
      %55 = "stablehlo.subtract"(%54, %50) : (tensor<i32>, tensor<i32>) -> tensor<i32> loc("gradient")
      %56 = "stablehlo.dynamic_slice"(%8, %55, %53) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %57 = "stablehlo.reshape"(%56) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %58 = "stablehlo.dynamic_slice"(%1, %55, %53) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %59 = "stablehlo.reshape"(%58) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %60 = "stablehlo.dynamic_slice"(%9, %55, %53) {slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32> loc("gradient")
      %61 = "stablehlo.reshape"(%60) : (tensor<1x4xf32>) -> tensor<4xf32> loc("gradient")
      %62 = "stablehlo.custom_call"(%57) {call_target_name = "annotate_device_placement", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
      %63 = "stablehlo.custom_call"(%61) {call_target_name = "annotate_device_placement", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
      %64 = "stablehlo.tanh"(%62) : (tensor<4xf32>) -> tensor<4xf32>
      %65 = "stablehlo.cosine"(%63) : (tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %66 = "stablehlo.multiply"(%51, %65) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %67 = "stablehlo.multiply"(%66, %59) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %68 = "stablehlo.multiply"(%64, %66) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %69 = "stablehlo.constant"() {value = dense<1.0e0> : tensor<4xf32>} : () -> tensor<4xf32> loc("gradient")
      %70 = "stablehlo.multiply"(%64, %64) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %71 = "stablehlo.subtract"(%69, %70) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %72 = "stablehlo.multiply"(%67, %71) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("gradient")
      %73 = "stablehlo.reshape"(%68) : (tensor<4xf32>) -> tensor<1x4xf32> loc("gradient")
      %74 = "stablehlo.dynamic_update_slice"(%52, %73, %55, %53) : (tensor<3x4xf32>, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> tensor<3x4xf32> loc("gradient")
      %75 = "stablehlo.constant"() {value = dense<1> : tensor<i32>} : () -> tensor<i32>
      %76 = "stablehlo.add"(%50, %75) : (tensor<i32>, tensor<i32>) -> tensor<i32> loc("gradient")
      "stablehlo.return"(%76, %72, %74) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) -> ()
    }) : (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) -> (tensor<i32>, tensor<4xf32>, tensor<3x4xf32>) loc("gradient")
    "func.return"(%38, %44) : (tensor<f32>, tensor<3x4xf32>) -> ()
  }
}

module @test {
  sdy.mesh @mesh = <["fsdp"=4]>
  func.func public @main(%0: tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>, tf.aliasing_output = 0 : i32}) -> (tensor<4x2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>}, tensor<2xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
    %1 = "stablehlo.constant"() {value = dense<1> : tensor<ui64>} : () -> tensor<ui64>
    %2 = "stablehlo.constant"() {value = dense<5808962797157046920> : tensor<ui64>} : () -> tensor<ui64>
    %3 = "stablehlo.constant"() {value = dense<9223372036854775808> : tensor<ui64>} : () -> tensor<ui64>
    %4 = "stablehlo.or"(%2, %3) : (tensor<ui64>, tensor<ui64>) -> tensor<ui64>
    %5 = "stablehlo.reshape"(%1) : (tensor<ui64>) -> tensor<1xui64>
    %6 = "stablehlo.reshape"(%4) : (tensor<ui64>) -> tensor<1xui64>
    %7 = "stablehlo.concatenate"(%5, %6) {dimension = 0 : i64} : (tensor<1xui64>, tensor<1xui64>) -> tensor<2xui64>
    %8, %9 = "stablehlo.rng_bit_generator"(%7) {rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>} : (tensor<2xui64>) -> (tensor<2xui64>, tensor<1xui64>)
    %10 = "stablehlo.reshape"(%9) : (tensor<1xui64>) -> tensor<ui64>
    %11 = "stablehlo.constant"() {value = dense<8> : tensor<ui32>} : () -> tensor<ui32>
    %12 = "stablehlo.constant"() {value = dense<0> : tensor<ui64>} : () -> tensor<ui64>
    %13 = "stablehlo.reshape"(%10) : (tensor<ui64>) -> tensor<1xui64>
    %14 = "stablehlo.reshape"(%12) : (tensor<ui64>) -> tensor<1xui64>
    %15 = "stablehlo.concatenate"(%13, %14) {dimension = 0 : i64} : (tensor<1xui64>, tensor<1xui64>) -> tensor<2xui64>
    %16, %17 = "stablehlo.rng_bit_generator"(%15) {rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>} : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x2xui32>)
    %18 = "stablehlo.broadcast_in_dim"(%11) {broadcast_dimensions = array<i64>} : (tensor<ui32>) -> tensor<4x2xui32>
    %19 = "stablehlo.shift_right_logical"(%17, %18) : (tensor<4x2xui32>, tensor<4x2xui32>) -> tensor<4x2xui32>
    %20 = "stablehlo.convert"(%19) : (tensor<4x2xui32>) -> tensor<4x2xf32>
    %21 = "stablehlo.constant"() {value = dense<5.9604645e-8> : tensor<f32>} : () -> tensor<f32>
    %22 = "stablehlo.broadcast_in_dim"(%21) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4x2xf32>
    %23 = "stablehlo.multiply"(%20, %22) : (tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>
    %24 = "stablehlo.constant"() {value = dense<5.0e-1> : tensor<f32>} : () -> tensor<f32>
    %25 = "stablehlo.broadcast_in_dim"(%24) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4x2xf32>
    %26 = "stablehlo.compare"(%23, %25) {comparison_direction = #stablehlo<comparison_direction LT>} : (tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<4x2xi1>
    %27 = "stablehlo.constant"() {value = dense<0.0e0> : tensor<f32>} : () -> tensor<f32>
    %28 = "stablehlo.broadcast_in_dim"(%27) {broadcast_dimensions = array<i64>} : (tensor<f32>) -> tensor<4x2xf32>
    %29 = "stablehlo.multiply"(%0, %28) : (tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>
    %30 = "stablehlo.select"(%26, %0, %29) : (tensor<4x2xi1>, tensor<4x2xf32>, tensor<4x2xf32>) -> tensor<4x2xf32>
    %31 = "sdy.sharding_constraint"(%30) {sharding = #sdy.sharding<@mesh, [{"fsdp"}, {}]>} : (tensor<4x2xf32>) -> tensor<4x2xf32>
    %32 = "stablehlo.constant"() {value = dense<0.0e0> : tensor<f32>} : () -> tensor<f32>
    %36 = "stablehlo.reduce"(%31, %32) ({ ^bb0(%33: tensor<f32>, %34: tensor<f32>): %35 = "stablehlo.add"(%33, %34) : (tensor<f32>, tensor<f32>) -> tensor<f32> "stablehlo.return"(%35) : (tensor<f32>) -> () }) {dimensions = array<i64: 0>} : (tensor<4x2xf32>, tensor<f32>) -> tensor<2xf32>
    "func.return"(%31, %36) : (tensor<4x2xf32>, tensor<2xf32>) -> ()
  }
}

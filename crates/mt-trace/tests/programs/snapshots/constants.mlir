module @test {
  func.func public @main() -> (tensor<2x3xi1>, tensor<2xf32>, tensor<4xf32>, tensor<f64>, tensor<bf16>, tensor<ui64>, tensor<i8>, tensor<2xi1>) {
    %0 = "stablehlo.constant"() {value = dense<[[true, false, true], [true, true, false]]> : tensor<2x3xi1>} : () -> tensor<2x3xi1>
    %1 = "stablehlo.constant"() {value = dense<"0x0000C03F0000C07F"> : tensor<2xf32>} : () -> tensor<2xf32>
    %2 = "stablehlo.constant"() {value = dense<0x7F800000> : tensor<4xf32>} : () -> tensor<4xf32>
    %3 = "stablehlo.constant"() {value = dense<-0.0e0> : tensor<f64>} : () -> tensor<f64>
    %4 = "stablehlo.constant"() {value = dense<0x3DCD> : tensor<bf16>} : () -> tensor<bf16>
    %5 = "stablehlo.constant"() {value = dense<18446744073709551615> : tensor<ui64>} : () -> tensor<ui64>
    %6 = "stablehlo.constant"() {value = dense<-128> : tensor<i8>} : () -> tensor<i8>
    %7 = "stablehlo.constant"() {value = dense<true> : tensor<2xi1>} : () -> tensor<2xi1>
    "func.return"(%0, %1, %2, %3, %4, %5, %6, %7) : (tensor<2x3xi1>, tensor<2xf32>, tensor<4xf32>, tensor<f64>, tensor<bf16>, tensor<ui64>, tensor<i8>, tensor<2xi1>) -> ()
  }
}

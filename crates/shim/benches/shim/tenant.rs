//! The programs that containers run.

use crate::driver::cuda::*;

pub fn play(arguments: &[String]) {
    let cuda = Cuda::started();
    let mut context = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    match arguments {
        [kind, lengths] if kind == "saturate" => saturate(&cuda, lengths),
        other => panic!("{other:?}"),
    }
}

/// The one who started this process says when.
fn go() {
    println!("ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

fn function(cuda: &Cuda, module: CUmodule, name: &str) -> CUfunction {
    let mut function = std::ptr::null_mut();
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: pointers to variables that live through the call.
    assert_eq!(unsafe { cuda.cuModuleGetFunction(&mut function, module, name.as_ptr()) }, CUDA_SUCCESS);
    function
}

fn functions(cuda: &Cuda, lengths: &str) -> Vec<CUfunction> {
    let mut module = std::ptr::null_mut();
    // SAFETY: as above.
    assert_eq!(unsafe { cuda.cuModuleLoadData(&mut module, c"any".as_ptr().cast()) }, CUDA_SUCCESS);
    lengths.split(',').map(|micros| function(cuda, module, &format!("busy_{micros}us"))).collect()
}

fn launch(cuda: &Cuda, function: CUfunction) {
    let none = std::ptr::null_mut();
    // SAFETY: no arguments, no stream.
    let code =
        unsafe { cuda.cuLaunchKernel(function, 1 << 20, 1, 1, 256, 1, 1, 0, none, none.cast(), none.cast()) };
    assert_eq!(code, CUDA_SUCCESS);
}

/// Always has work, until killed: kernels of these lengths in microseconds, in any order.
fn saturate(cuda: &Cuda, lengths: &str) {
    let kernels = functions(cuda, lengths);
    go();
    let mut random = u64::from(std::process::id()) * 0x9e37_79b9 + 1;
    loop {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        launch(cuda, kernels[random as usize % kernels.len()]);
    }
}

//! Matrix products by cuBLASLt. Descriptors, layouts and the algorithm of a shape are created once and kept.
//!
//! For few rows the library's first suggestion is not always its fastest. Several are therefore timed at the first use
//! of a shape, each with a flushed cache, as in a step.
//!
//! The library is column-major: `out = x · weightsᵀ` in rows is `outᵀ = weights · xᵀ` there.
#![allow(unsafe_code, reason = "calls into the library; see each block")]

use std::collections::HashMap;
use std::ffi::c_void;

use cudarc::cublaslt::sys;
use cudarc::driver::sys as driver;

use super::super::device::{DeviceError, Element, Matmul};

/// Workspace of the library, and the memory that is written to flush the cache.
pub(super) const WORKSPACE_BYTES: usize = 64 << 20;
/// Suggestions are timed up to this number of rows.
const TIMED_ROWS_MAX: usize = 256;
/// Number of requested suggestions, and runs of each.
const SUGGESTIONS: usize = 8;
const RUNS: usize = 3;
/// Most cached shapes. Rows are rounded to few sizes, so a model has far fewer.
const SHAPES_MAX: usize = 2_048;

fn check(call: &'static str, status: sys::cublasStatus_t) -> Result<(), DeviceError> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(DeviceError::Call { call, what: format!("{other:?}") }),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MatmulSize {
    rows: usize,
    inputs: usize,
    outputs: usize,
    element: Element,
    result: Element,
}

/// Descriptors and algorithm of one shape.
struct MatmulPlan {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: Option<sys::cublasLtMatmulAlgo_t>,
}

impl Drop for MatmulPlan {
    fn drop(&mut self) {
        // SAFETY: handles that are not null were created by the library, and are destroyed once. Enqueued work does not
        // need them any more.
        unsafe {
            for layout in [self.weights, self.x, self.out].into_iter().filter(|layout| !layout.is_null()) {
                let _ = sys::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.operation.is_null() {
                let _ = sys::cublasLtMatmulDescDestroy(self.operation);
            }
        }
    }
}

pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: driver::CUdeviceptr,
    plans: HashMap<MatmulSize, MatmulPlan>,
}

impl Default for Blas {
    fn default() -> Self {
        Self { handle: std::ptr::null_mut(), workspace: 0, plans: HashMap::new() }
    }
}

fn kind(element: Element) -> sys::cudaDataType {
    match element {
        Element::F32 => sys::cudaDataType::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

impl Blas {
    pub(super) fn open(&mut self, workspace: driver::CUdeviceptr) -> Result<(), DeviceError> {
        self.workspace = workspace;
        // SAFETY: the out-parameter is valid.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut self.handle) })
    }

    pub(super) fn close(&mut self) {
        self.plans.clear();
        if !self.handle.is_null() {
            // SAFETY: it was created and is destroyed once.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
            self.handle = std::ptr::null_mut();
        }
    }

    /// Enqueues a product. `at` are the addresses of x, weights and out.
    pub(super) fn matmul(
        &mut self,
        on: driver::CUstream,
        matmul: &Matmul,
        at: [driver::CUdeviceptr; 3],
    ) -> Result<(), DeviceError> {
        let Matmul { rows, inputs, outputs, element, result, .. } = *matmul;
        let size = MatmulSize { rows, inputs, outputs, element, result };
        if !self.plans.contains_key(&size) {
            if self.plans.len() >= SHAPES_MAX {
                self.plans.clear();
            }
            let plan = self.find(on, &size, at)?;
            self.plans.insert(size, plan);
        }
        let plan = &self.plans[&size];
        let algorithm = plan.algorithm.as_ref().expect("a plan that was found has one");
        self.run(on, plan, algorithm, at)
    }

    fn run(
        &self,
        on: driver::CUstream,
        plan: &MatmulPlan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        [x, weights, out]: [driver::CUdeviceptr; 3],
    ) -> Result<(), DeviceError> {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let pointer = |address: driver::CUdeviceptr| address as usize as *mut c_void;
        // SAFETY: descriptors and layouts are alive and describe the memory at the addresses, whose ranges the device
        // checked; the scales are read before the call returns; the workspace has the size that was set for the
        // algorithm.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.operation,
                std::ptr::from_ref(&one).cast(),
                pointer(weights),
                plan.weights,
                pointer(x),
                plan.x,
                std::ptr::from_ref(&zero).cast(),
                pointer(out),
                plan.out,
                pointer(out),
                plan.out,
                algorithm,
                pointer(self.workspace),
                WORKSPACE_BYTES,
                on.cast(),
            )
        };
        check("cublasLtMatmul", status)
    }

    /// The fastest plan that the library suggests.
    fn find(
        &self,
        on: driver::CUstream,
        size: &MatmulSize,
        at: [driver::CUdeviceptr; 3],
    ) -> Result<MatmulPlan, DeviceError> {
        let (operation, layout) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut plan = MatmulPlan { operation, weights: layout, x: layout, out: layout, algorithm: None };
        let layout = |to: *mut sys::cublasLtMatrixLayout_t, element, lines: usize, length: usize| {
            // SAFETY: the out-parameter is valid.
            let made = unsafe {
                sys::cublasLtMatrixLayoutCreate(to, kind(element), lines as u64, length as u64, lines as i64)
            };
            check("cublasLtMatrixLayoutCreate", made)
        };
        layout(&raw mut plan.weights, size.element, size.inputs, size.outputs)?;
        layout(&raw mut plan.x, size.element, size.inputs, size.rows)?;
        layout(&raw mut plan.out, size.result, size.outputs, size.rows)?;
        let suggestions = self.suggestions(&mut plan)?;
        if suggestions.is_empty() {
            return Err(DeviceError::Call {
                call: "cublasLtMatmulAlgoGetHeuristic",
                what: format!("no matmul algorithm for {size:?}"),
            });
        }
        let mut fastest = (f32::INFINITY, suggestions[0]);
        // f32 is for exactness, and its plan does not depend on timing: engines then agree to the last bit.
        let is_timed = size.element == Element::Bf16 && size.rows <= TIMED_ROWS_MAX;
        if is_timed && suggestions.len() > 1 {
            for algorithm in suggestions {
                // A suggestion that fails here is skipped.
                if let Ok(elapsed) = self.time(on, &plan, &algorithm, at)
                    && elapsed < fastest.0
                {
                    fastest = (elapsed, algorithm);
                }
            }
        }
        plan.algorithm = Some(fastest.1);
        Ok(plan)
    }

    fn suggestions(&self, plan: &mut MatmulPlan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, DeviceError> {
        // CUBLAS_OP_T of cublas_api.h; this library's own header does not define it.
        let transposed = 1_i32;
        let mut preference = std::ptr::null_mut();
        let mut count = 0;
        let mut found: [std::mem::MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>; SUGGESTIONS] =
            [const { std::mem::MaybeUninit::uninit() }; SUGGESTIONS];
        // SAFETY: out-parameters are valid, attributes have the sizes of their types, and only the results that the
        // library has written are read.
        unsafe {
            let made = sys::cublasLtMatmulDescCreate(
                &raw mut plan.operation,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            );
            check("cublasLtMatmulDescCreate", made)?;
            let set = sys::cublasLtMatmulDescSetAttribute(
                plan.operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            );
            check("cublasLtMatmulDescSetAttribute", set)?;
            let made = sys::cublasLtMatmulPreferenceCreate(&raw mut preference);
            check("cublasLtMatmulPreferenceCreate", made)?;
            let set = sys::cublasLtMatmulPreferenceSetAttribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&WORKSPACE_BYTES).cast(),
                size_of::<usize>(),
            );
            let asked = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                plan.operation,
                plan.weights,
                plan.x,
                plan.out,
                plan.out,
                preference,
                SUGGESTIONS as i32,
                found[0].as_mut_ptr(),
                &raw mut count,
            );
            let _ = sys::cublasLtMatmulPreferenceDestroy(preference);
            check("cublasLtMatmulPreferenceSetAttribute", set)?;
            check("cublasLtMatmulAlgoGetHeuristic", asked)?;
            let written = usize::try_from(count).unwrap_or(0).min(SUGGESTIONS);
            let results = found[..written].iter().map(|result| result.assume_init());
            let good = results.filter(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
            Ok(good.map(|result| result.algo).collect())
        }
    }

    /// The shortest of a few runs in milliseconds, each with a cold cache. Every run writes the correct result.
    fn time(
        &self,
        on: driver::CUstream,
        plan: &MatmulPlan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        at: [driver::CUdeviceptr; 3],
    ) -> Result<f32, DeviceError> {
        let (mut from, mut to) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut best = Ok(f32::INFINITY);
        // SAFETY: events are created before and destroyed after their use; the whole workspace is allocated.
        unsafe {
            super::check("cuEventCreate", driver::cuEventCreate(&raw mut from, 0))?;
            super::check("cuEventCreate", driver::cuEventCreate(&raw mut to, 0))?;
            for _ in 0..RUNS {
                let elapsed = (|| {
                    let flushed = driver::cuMemsetD8Async(self.workspace, 0, WORKSPACE_BYTES, on);
                    super::check("cuMemsetD8Async", flushed)?;
                    super::check("cuEventRecord", driver::cuEventRecord(from, on))?;
                    self.run(on, plan, algorithm, at)?;
                    super::check("cuEventRecord", driver::cuEventRecord(to, on))?;
                    super::stream::await_event("a product that is timed", to, &mut || ())?;
                    let mut elapsed = 0.0;
                    let read = driver::cuEventElapsedTime_v2(&raw mut elapsed, from, to);
                    super::check("cuEventElapsedTime", read)?;
                    Ok::<f32, DeviceError>(elapsed)
                })();
                best = best.and_then(|best: f32| elapsed.map(|elapsed| best.min(elapsed)));
            }
            let _ = driver::cuEventDestroy_v2(from);
            let _ = driver::cuEventDestroy_v2(to);
        }
        best
    }
}

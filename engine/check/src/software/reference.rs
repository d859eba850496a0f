//! The reference kernels: every kernel in Rust, with the same arguments.
//!
//! A reference kernel computes the same as its kernel, block by block, without optimizations. On a real device the
//! kernel's results are compared with it. The software device checks its memory accesses.

mod attention;
mod choose;
mod experts;

use half::bf16;

use super::memory::AccessSpan;
use super::{SoftwareMemory, SoftwareModule};
use baton_engine::compute::cuda::device::{DeviceSlice, Element, Kernel, KernelArg, Launch, Matmul};
use baton_engine::compute::cuda::kernels::FEW_ROWS_MAX;
use baton_engine::compute::cuda::narrow;

/// An error of a kernel.
pub(super) type KernelFault = String;

/// One launch in progress.
pub(super) struct KernelRun<'a> {
    buffers: &'a mut [Option<SoftwareMemory>],
    launch: &'a Launch,
    pub(super) module: SoftwareModule,
    touched: Vec<Vec<AccessSpan>>,
}

impl<'a> KernelRun<'a> {
    pub(super) fn new(
        buffers: &'a mut [Option<SoftwareMemory>],
        launch: &'a Launch,
        module: SoftwareModule,
    ) -> Self {
        Self { buffers, launch, module, touched: vec![Vec::new(); launch.args.len()] }
    }

    /// The accesses through each argument, sorted and merged.
    pub(super) fn touched(self) -> Vec<Vec<AccessSpan>> {
        let merge = |mut spans: Vec<AccessSpan>| {
            spans.sort_unstable_by_key(|span| (span.write, span.start));
            let mut merged: Vec<AccessSpan> = Vec::new();
            for span in spans {
                match merged.last_mut() {
                    Some(last) if last.write == span.write && span.start <= last.end => {
                        last.end = last.end.max(span.end);
                    }
                    _ => merged.push(span),
                }
            }
            merged
        };
        self.touched.into_iter().map(merge).collect()
    }

    fn grid(&self) -> [usize; 3] {
        self.launch.grid.map(|blocks| blocks as usize)
    }

    fn arg(&self, arg: usize) -> Result<KernelArg, KernelFault> {
        self.launch.args.get(arg).copied().ok_or_else(|| format!("argument {arg} is missing"))
    }

    fn number(&self, arg: usize) -> Result<usize, KernelFault> {
        match self.arg(arg)? {
            KernelArg::U32(value) => Ok(value as usize),
            KernelArg::U64(value) => Ok(value as usize),
            other => Err(format!("argument {arg} is {other:?}, not a whole number")),
        }
    }

    fn float(&self, arg: usize) -> Result<f32, KernelFault> {
        match self.arg(arg)? {
            KernelArg::F32(value) => Ok(value),
            other => Err(format!("argument {arg} is {other:?}, not a float")),
        }
    }

    /// Whether the launch has an argument of a feature.
    fn has(&self, arg: usize) -> bool {
        arg < self.launch.args.len()
    }

    /// The activation of gate: silu, or what argument `arg` names.
    fn activation(&self, arg: usize) -> Result<fn(f32) -> f32, KernelFault> {
        if !self.has(arg) {
            return Ok(silu);
        }
        match self.number(arg)? {
            0 => Ok(silu),
            1 => Ok(gelu),
            other => Err(format!("activation {other}")),
        }
    }

    fn is_null(&self, arg: usize) -> Result<bool, KernelFault> {
        Ok(self.arg(arg)? == KernelArg::Null)
    }

    fn bytes(&mut self, arg: usize, at: usize, len: usize, write: bool) -> Result<&mut [u8], KernelFault> {
        let slice = match (self.arg(arg)?, write) {
            (KernelArg::In(slice), false) | (KernelArg::Out(slice), _) => slice,
            (other, _) => return Err(format!("argument {arg} is {other:?}")),
        };
        if at + len > slice.bytes {
            return Err(format!("argument {arg}: bytes {at} to {} of {}", at + len, slice.bytes));
        }
        let spans = &mut self.touched[arg];
        match spans.last_mut() {
            Some(last) if last.write == write && last.end == at => last.end = at + len,
            Some(last) if last.write == write && last.start <= at && at + len <= last.end => {}
            _ => spans.push(AccessSpan { start: at, end: at + len, write }),
        }
        let memory = self.buffers[slice.buffer.0 as usize].as_mut().expect("it was checked");
        Ok(&mut memory.bytes.as_mut_slice()[slice.offset + at..][..len])
    }

    /// `len` elements from element `at`.
    fn read(&mut self, arg: usize, element: Element, at: usize, len: usize) -> Result<Vec<f32>, KernelFault> {
        let size = element.bytes();
        Ok(widen(self.bytes(arg, at * size, len * size, false)?, element))
    }

    fn write(&mut self, arg: usize, element: Element, at: usize, values: &[f32]) -> Result<(), KernelFault> {
        let size = element.bytes();
        narrow(values, element, self.bytes(arg, at * size, values.len() * size, true)?);
        Ok(())
    }

    fn integers(&mut self, arg: usize, at: usize, len: usize) -> Result<Vec<i32>, KernelFault> {
        let bytes = self.bytes(arg, at * 4, len * 4, false)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|raw| i32::from_le_bytes(*raw)).collect())
    }

    fn write_integer(&mut self, arg: usize, at: usize, value: i32) -> Result<(), KernelFault> {
        self.bytes(arg, at * 4, 4, true)?.copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    /// An index that a kernel computes from data. A negative one is an error.
    fn index(value: i32, what: &str) -> Result<usize, KernelFault> {
        usize::try_from(value).map_err(|_| format!("{what} {value}"))
    }
}

/// Converts elements to f32, exactly.
pub(crate) fn widen(bytes: &[u8], element: Element) -> Vec<f32> {
    match element {
        Element::F32 => bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        Element::Bf16 => {
            bytes.as_chunks::<2>().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect()
        }
    }
}

pub(super) fn run(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    match run.launch.kernel {
        Kernel::Embed => embed(run),
        Kernel::AddRmsNorm => add_rms_norm(run),
        Kernel::RopeKv => rope_kv(run),
        Kernel::DecodeAttention => attention::decode(run),
        Kernel::MergeAttention => attention::merge(run),
        Kernel::PrefillAttention => attention::prefill(run),
        Kernel::SiluMul => silu_mul(run),
        Kernel::BestOfParts => choose::best_of_parts(run),
        Kernel::Choose => choose::choose(run),
        Kernel::FewRowsWide => few_rows(run, 32),
        Kernel::FewRowsDeep => few_rows(run, 16),
        Kernel::FewRowsGated => few_rows_gated(run),
        Kernel::CapLogits => cap_logits(run),
        Kernel::Route => experts::route(run),
        Kernel::GroupExperts => experts::group(run),
        Kernel::ExpertGateUp => experts::gate_up(run),
        Kernel::ExpertDown => experts::down(run),
        Kernel::CombineExperts => experts::combine(run),
    }
}

fn embed(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (element, width, [rows, ..]) = (run.module.element, run.number(3)?, run.grid());
    for row in 0..rows {
        let token = KernelRun::index(run.integers(0, row, 1)?[0], "token")?;
        let mut values = run.read(1, element, token * width, width)?;
        if run.has(4) {
            let scale = run.float(4)?;
            values.iter_mut().for_each(|value| *value *= scale);
        }
        run.write(2, Element::F32, row * width, &values)?;
    }
    Ok(())
}

fn inverse_rms(values: &[f32], eps: f32) -> f32 {
    let squares: f32 = values.iter().map(|value| value * value).sum();
    1.0 / (squares / values.len() as f32 + eps).sqrt()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// The approximation by a hyperbolic tangent.
fn gelu(x: f32) -> f32 {
    const SCALE: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SCALE * (x + 0.044_715 * (x * x * x))).tanh())
}

/// A soft cap.
fn capped(x: f32, cap: f32) -> f32 {
    cap * (x / cap).tanh()
}

fn cap_logits(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (width, cap, [parts, rows, _]) = (run.number(1)?, run.float(2)?, run.grid());
    let computed = width.min(parts * run.launch.threads as usize);
    for row in 0..rows {
        let logits = run.read(0, Element::F32, row * width, computed)?;
        let logits: Vec<_> = logits.into_iter().map(|logit| capped(logit, cap)).collect();
        run.write(0, Element::F32, row * width, &logits)?;
    }
    Ok(())
}

fn add_rms_norm(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (element, width, eps) = (run.module.element, run.number(6)?, run.float(7)?);
    for block in 0..run.grid()[0] {
        let row = match run.is_null(4)? {
            true => block,
            false => match run.integers(4, block, 1)?[0] {
                ..0 => continue,
                row => KernelRun::index(row, "row")?,
            },
        };
        let mut x = run.read(0, Element::F32, row * width, width)?;
        if !run.is_null(1)? {
            let delta = run.read(1, Element::F32, row * width, width)?;
            let bias = if run.is_null(2)? { vec![0.0; width] } else { run.read(2, Element::F32, 0, width)? };
            let mut added: Vec<_> = delta.into_iter().zip(bias).map(|(delta, bias)| delta + bias).collect();
            if run.has(8) && !run.is_null(8)? {
                let (scale, post) = (inverse_rms(&added, eps), run.read(8, Element::F32, 0, width)?);
                added.iter_mut().zip(post).for_each(|(value, post)| *value *= scale * post);
            }
            x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
            run.write(0, Element::F32, row * width, &x)?;
        }
        let (scale, weight) = (inverse_rms(&x, eps), run.read(3, Element::F32, 0, width)?);
        let out: Vec<_> = x.iter().zip(weight).map(|(x, weight)| x * scale * weight).collect();
        run.write(5, element, block * width, &out)?;
    }
    Ok(())
}

fn rope_kv(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (element, dim) = (run.module.element, run.module.head_dim);
    let (block_stride, layer) = (run.number(8)?, run.number(9)?);
    let (heads, kv_heads, block_tokens) = (run.number(10)?, run.number(11)?, run.number(12)?);
    let (eps, units, [rows, groups, _]) = (run.float(13)?, heads + 2 * kv_heads, run.grid());
    let rotary = if run.has(14) { run.number(14)? } else { dim };
    if rotary > dim || rotary % 2 != 0 {
        return Err(format!("{rotary} of {dim} elements are rotated"));
    }
    for row in 0..rows {
        let slot = run.integers(6, row, 1)?[0];
        for unit in 0..units.min(groups * 4) {
            let (is_query, is_value) = (unit < heads, unit >= heads + kv_heads);
            if !is_query && slot < 0 {
                continue;
            }
            let at = (row * units + unit) * dim;
            let mut head = run.read(0, element, at, dim)?;
            if !run.is_null(1)? {
                let bias = run.read(1, Element::F32, unit * dim, dim)?;
                head.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
            let norm = if is_query { 2 } else { 3 };
            if !is_value && !run.is_null(norm)? {
                let (scale, weight) = (inverse_rms(&head, eps), run.read(norm, Element::F32, 0, dim)?);
                head.iter_mut().zip(weight).for_each(|(value, weight)| *value *= scale * weight);
            }
            if !is_value {
                let position = KernelRun::index(run.integers(5, row, 1)?[0], "position")?;
                let angles = run.read(4, Element::F32, position * dim, dim)?;
                rotate(&mut head, &angles, rotary);
            }
            if is_query {
                run.write(0, element, at, &head)?;
            } else {
                let slot = KernelRun::index(slot, "slot")?;
                let vector = (unit - heads) * block_tokens + slot % block_tokens;
                run.write(7, element, slot / block_tokens * block_stride + layer + vector * dim, &head)?;
            }
        }
    }
    Ok(())
}

/// Rotates the pairs of a head. The pairs beyond `rotary` elements follow the others.
fn rotate(head: &mut [f32], angles: &[f32], rotary: usize) {
    let half = head.len() / 2;
    for pair in 0..half {
        let is_first = pair < rotary / 2;
        let (low, high) = if is_first { (pair, pair + rotary / 2) } else { (pair + rotary / 2, pair + half) };
        let (x, y, cos, sin) = (head[low], head[high], angles[pair], angles[half + pair]);
        (head[low], head[high]) = (x * cos - y * sin, y * cos + x * sin);
    }
}

fn silu_mul(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (element, width, [parts, rows, _]) = (run.module.element, run.number(3)?, run.grid());
    let computed = width.min(parts * run.launch.threads as usize);
    let activation = run.activation(4)?;
    for row in 0..rows {
        let mut gate = run.read(0, element, row * 2 * width, computed)?;
        let mut up = run.read(0, element, (row * 2 + 1) * width, computed)?;
        if !run.is_null(1)? {
            let add = |values: &mut [f32], bias: Vec<f32>| {
                values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            };
            add(&mut gate, run.read(1, Element::F32, 0, computed)?);
            add(&mut up, run.read(1, Element::F32, width, computed)?);
        }
        let out: Vec<_> = gate.into_iter().zip(up).map(|(gate, up)| activation(gate) * up).collect();
        run.write(2, element, row * width, &out)?;
    }
    Ok(())
}

/// Products of `rows` rows with `count` rows of the matrix from `first` on, row by row of x.
fn sums(
    run: &mut KernelRun<'_>,
    rows: usize,
    inputs: usize,
    first: usize,
    count: usize,
) -> Result<Vec<f32>, KernelFault> {
    if rows > FEW_ROWS_MAX {
        return Err(format!("{rows} rows"));
    }
    let element = run.module.element;
    let x = run.read(0, element, 0, rows * inputs)?;
    let weights = run.read(1, element, first * inputs, count * inputs)?;
    let of_row = |x| weights.chunks_exact(inputs).map(move |weights| dot(x, weights));
    Ok(x.chunks_exact(inputs).flat_map(of_row).collect())
}

fn few_rows(run: &mut KernelRun<'_>, at_once: usize) -> Result<(), KernelFault> {
    let (rows, inputs, outputs) = (run.number(4)?, run.number(5)?, run.number(6)?);
    if run.grid()[0] * at_once != outputs {
        return Err(format!("{} blocks for {outputs} outputs", run.grid()[0]));
    }
    let sums = sums(run, rows, inputs, 0, outputs)?;
    match run.is_null(2)? {
        true => run.write(3, Element::F32, 0, &sums),
        false => run.write(2, run.module.element, 0, &sums),
    }
}

fn few_rows_gated(run: &mut KernelRun<'_>) -> Result<(), KernelFault> {
    let (rows, inputs, outputs) = (run.number(4)?, run.number(5)?, run.number(6)?);
    if run.grid()[0] * 16 != outputs {
        return Err(format!("{} blocks for {outputs} outputs", run.grid()[0]));
    }
    let activation = run.activation(7)?;
    let (gate, up) = (sums(run, rows, inputs, 0, outputs)?, sums(run, rows, inputs, outputs, outputs)?);
    let bias = match run.is_null(2)? {
        true => vec![0.0; 2 * outputs],
        false => run.read(2, Element::F32, 0, 2 * outputs)?,
    };
    let out: Vec<_> = gate
        .iter()
        .zip(up)
        .enumerate()
        .map(|(at, (gate, up))| {
            let (gate, up) = (gate + bias[at % outputs], up + bias[outputs + at % outputs]);
            activation(gate) * up
        })
        .collect();
    run.write(3, run.module.element, 0, &out)
}

/// Computes the product, whose ranges have been checked.
pub(super) fn matmul(buffers: &mut [Option<SoftwareMemory>], matmul: &Matmul) {
    let (rows, inputs, outputs) = (matmul.rows, matmul.inputs, matmul.outputs);
    let read = |slice: &DeviceSlice, len: usize| {
        let memory = buffers[slice.buffer.0 as usize].as_ref().expect("it was checked");
        widen(&memory.bytes.as_slice()[slice.offset..][..len * matmul.element.bytes()], matmul.element)
    };
    let (x, weights) = (read(&matmul.x, rows * inputs), read(&matmul.weights, outputs * inputs));
    let mut out = vec![0.0; rows * outputs];
    for (output, weights) in weights.chunks_exact(inputs).enumerate() {
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            out[row * outputs + output] = dot(x, weights);
        }
    }
    let memory = buffers[matmul.out.buffer.0 as usize].as_mut().expect("it was checked");
    let to = &mut memory.bytes.as_mut_slice()[matmul.out.offset..][..out.len() * matmul.result.bytes()];
    narrow(&out, matmul.result, to);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let ((a_whole, a_rest), (b_whole, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a_whole.iter().zip(b_whole) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

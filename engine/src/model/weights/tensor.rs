//! One tensor: its values as they are stored, and the order in which they are read.

use std::borrow::Cow;
use std::fmt;

use half::{bf16, f16};

use crate::model::quantized::QuantizedMatrix;
use crate::model::quantized::ggml::GgmlType;
use crate::model::quantized::groups::{GROUP, IntegerForm, IntegerGroup};
use crate::model::tensors::{ElementOrder, ExpertOutputs};

/// Element type of a tensor. Quantized ones are read as [`WeightDtype::F32`], but MXFP4, whose values bf16 has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
}

impl WeightDtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The nearest number of this type, the even one of two.
    #[must_use]
    pub fn rounded(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// One tensor: row-major values, not necessarily aligned.
#[derive(Clone)]
pub struct Tensor<'a> {
    values: TensorValues<'a>,
    /// Its first element among the values.
    first: usize,
    len: usize,
    /// Where its other elements are.
    order: ElementOrder,
}

#[derive(Clone)]
pub(super) enum TensorValues<'a> {
    /// Little-endian floats.
    Plain(WeightDtype, Cow<'a, [u8]>),
    /// Blocks of a GGUF type.
    Blocks(GgmlType, Cow<'a, [u8]>),
    /// A matrix whose scales are tensors of their own.
    Matrix(QuantizedMatrix<'a>),
}

impl<'a> Tensor<'a> {
    pub(super) fn new(values: TensorValues<'a>, shape: &[usize]) -> Self {
        Self { values, first: 0, len: shape.iter().product(), order: ElementOrder::Sequential }
    }
}

#[cfg(test)]
impl Tensor<'static> {
    /// A tensor of a GGUF type, by the type's number.
    pub(crate) fn of_blocks(kind: u32, bytes: Vec<u8>, shape: &[usize]) -> Self {
        let kind = GgmlType::of(kind).expect("a type that is read");
        let blocks = shape.iter().product::<usize>() / kind.block_len();
        assert_eq!(bytes.len(), blocks * kind.block_bytes());
        Self::new(TensorValues::Blocks(kind, Cow::Owned(bytes)), shape)
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor").field("dtype", &self.dtype()).field("bytes", &self.bytes()).finish()
    }
}

impl Tensor<'_> {
    /// Elements `start .. start + len` as a tensor of its own.
    ///
    /// # Panics
    /// When the range is outside the tensor, or the tensor is a part of an expert.
    #[must_use]
    pub fn into_part(self, start: usize, len: usize) -> Self {
        assert!(start + len <= self.len, "a part of the tensor");
        assert!(self.order == ElementOrder::Sequential, "elements one after the other");
        Self { first: self.first + start, len, ..self }
    }

    /// Outputs of one expert as a matrix of outputs by inputs. This tensor has all experts: `[experts, inputs,
    /// outputs]`, or of a quantized format in the order of that format.
    ///
    /// # Panics
    /// When they are outside the tensor.
    #[must_use]
    pub fn of_expert(&self, part: &ExpertOutputs) -> Tensor<'_> {
        let ExpertOutputs { expert, inputs, outputs, first, step } = *part;
        assert!((expert + 1) * inputs * outputs <= self.len && first < outputs, "outputs of an expert");
        let values = self.values.borrowed();
        let by_outputs = matches!(values, TensorValues::Matrix(QuantizedMatrix::Mxfp4(_)));
        let (output, input) = if by_outputs { (inputs, 1) } else { (1, outputs) };
        Tensor {
            values,
            first: self.first + expert * inputs * outputs + first * output,
            len: part.count() * inputs,
            order: ElementOrder::Strided { columns: inputs, row: step * output, column: input },
        }
    }

    /// Element type in the file, or that of the converted values.
    #[must_use]
    pub fn dtype(&self) -> WeightDtype {
        match &self.values {
            TensorValues::Plain(dtype, _) => *dtype,
            TensorValues::Matrix(QuantizedMatrix::Mxfp4(_)) => WeightDtype::Bf16,
            TensorValues::Blocks(..) | TensorValues::Matrix(_) => WeightDtype::F32,
        }
    }

    /// Size in the file, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.values {
            TensorValues::Plain(dtype, _) => self.len * dtype.bytes(),
            TensorValues::Blocks(kind, _) => self.len.div_ceil(kind.block_len()) * kind.block_bytes(),
            // A matrix of this kind is one tensor in every family.
            TensorValues::Matrix(matrix) => matrix.bytes(),
        }
    }

    /// Elements `start .. start + out.len()` as f32: without loss, or as the quantized format defines them.
    ///
    /// # Panics
    /// When the range is outside the tensor.
    pub fn read_f32(&self, start: usize, out: &mut [f32]) {
        assert!(start + out.len() <= self.len, "a part of the tensor");
        self.order.each_run(start, out, |at, out| self.values.read_f32(self.first + at, out));
    }

    /// How the stored integers are grouped, if rows of `inputs` elements are whole groups of integers.
    #[must_use]
    pub(crate) fn integer_form(&self, inputs: usize) -> Option<IntegerForm> {
        let form = match &self.values {
            TensorValues::Plain(..) => None,
            TensorValues::Blocks(kind, _) => kind.integer_form(),
            TensorValues::Matrix(matrix) => matrix.integer_form(),
        };
        let is_whole = inputs.is_multiple_of(GROUP) && self.first.is_multiple_of(inputs.max(1));
        form.filter(|form| is_whole && self.order == ElementOrder::Sequential && form.span <= inputs / GROUP)
    }

    /// The group of integers that begins at element `start`.
    ///
    /// # Panics
    /// When the group is outside the tensor, or [`Self::integer_form`] has no form.
    pub(crate) fn read_group(&self, start: usize) -> IntegerGroup {
        assert!(start + GROUP <= self.len, "a part of the tensor");
        match &self.values {
            TensorValues::Plain(..) => panic!("a tensor of integers"),
            TensorValues::Blocks(kind, bytes) => kind.read_group(bytes, self.first + start),
            TensorValues::Matrix(matrix) => matrix.read_group(self.first + start),
        }
    }

    /// Stored bytes of the elements `start .. start + len` of a bf16 tensor.
    ///
    /// # Panics
    /// When the tensor is not stored as bf16 or is a part of an expert, or the range is outside it.
    #[must_use]
    pub fn bf16_bytes(&self, start: usize, len: usize) -> &[u8] {
        assert!(start + len <= self.len, "a part of the tensor");
        assert!(self.order == ElementOrder::Sequential, "elements one after the other");
        self.values.bf16_bytes(self.first + start, len)
    }

    /// Elements `start .. start + out.len()` of a tensor whose type is bf16, as numbers.
    ///
    /// # Panics
    /// When it is of another type, or the range is outside it.
    pub fn read_bf16_bits(&self, start: usize, out: &mut [u16]) {
        assert!(start + out.len() <= self.len, "a part of the tensor");
        self.order.each_run(start, out, |at, out| self.values.read_bf16_bits(self.first + at, out));
    }
}

impl TensorValues<'_> {
    /// The same values without a copy.
    fn borrowed(&self) -> TensorValues<'_> {
        match self {
            Self::Plain(dtype, bytes) => TensorValues::Plain(*dtype, Cow::Borrowed(&bytes[..])),
            Self::Blocks(kind, bytes) => TensorValues::Blocks(*kind, Cow::Borrowed(&bytes[..])),
            Self::Matrix(matrix) => TensorValues::Matrix(matrix.clone()),
        }
    }

    /// Values `start .. start + out.len()`.
    fn read_f32(&self, start: usize, out: &mut [f32]) {
        let (dtype, bytes) = match self {
            Self::Plain(dtype, bytes) => (*dtype, bytes),
            Self::Blocks(kind, bytes) => return kind.read_f32(bytes, start, out),
            Self::Matrix(matrix) => return matrix.read_f32(start, out),
        };
        let size = dtype.bytes();
        let bytes = &bytes[start * size..(start + out.len()) * size];
        match dtype {
            WeightDtype::F32 => {
                for (out, raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(*raw);
                }
            }
            WeightDtype::F16 => {
                for (out, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *out = f16::from_le_bytes(*raw).to_f32();
                }
            }
            WeightDtype::Bf16 => {
                for (out, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *out = bf16::from_le_bytes(*raw).to_f32();
                }
            }
        }
    }

    fn read_bf16_bits(&self, start: usize, out: &mut [u16]) {
        if let Self::Matrix(QuantizedMatrix::Mxfp4(matrix)) = self {
            return matrix.read_bf16_bits(start, out);
        }
        let bytes = self.bf16_bytes(start, out.len());
        for (out, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *out = u16::from_le_bytes(*raw);
        }
    }

    fn bf16_bytes(&self, start: usize, len: usize) -> &[u8] {
        match self {
            Self::Plain(WeightDtype::Bf16, bytes) => &bytes[start * 2..(start + len) * 2],
            _ => panic!("a bf16 tensor"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers 0, 1, … in bf16, which has all of them up to 256.
    fn counted(shape: &[usize]) -> Tensor<'static> {
        let count = shape.iter().product::<usize>();
        let bytes = (0..count).flat_map(|number| bf16::from_f32(number as f32).to_le_bytes()).collect();
        Tensor::new(TensorValues::Plain(WeightDtype::Bf16, Cow::Owned(bytes)), shape)
    }

    #[test]
    fn an_expert_has_every_second_output_of_its_part_of_a_fused_tensor() {
        let (inputs, outputs) = (3, 4);
        let all = counted(&[2, inputs, outputs]);
        // Element 12 e + 4 i + o is input i of output o of expert e.
        for (first, wanted) in
            [(0, [12.0, 16.0, 20.0, 14.0, 18.0, 22.0]), (1, [13.0, 17.0, 21.0, 15.0, 19.0, 23.0])]
        {
            let part = all.of_expert(&ExpertOutputs { expert: 1, inputs, outputs, first, step: 2 });
            let mut values = [0.0; 6];
            part.read_f32(0, &mut values);
            assert_eq!(values, wanted);
            assert_eq!((part.dtype(), part.bytes()), (WeightDtype::Bf16, 12));
            // A row at a time, as they are packed, and across the end of one.
            let mut row = [0; 3];
            part.read_bf16_bits(3, &mut row);
            assert_eq!(row.map(|bits| bf16::from_bits(bits).to_f32()), wanted[3..]);
            part.read_f32(2, &mut values[..2]);
            assert_eq!(values[..2], wanted[2..4]);
        }
        let whole = all.of_expert(&ExpertOutputs { expert: 0, inputs, outputs, first: 0, step: 1 });
        let mut values = [0.0; 12];
        whole.read_f32(0, &mut values);
        assert_eq!(values, [0.0, 4.0, 8.0, 1.0, 5.0, 9.0, 2.0, 6.0, 10.0, 3.0, 7.0, 11.0]);
    }

    #[test]
    fn biases_of_an_expert_are_its_row() {
        let all = counted(&[3, 4]);
        let mut values = [0.0; 2];
        let part = ExpertOutputs { expert: 2, inputs: 1, outputs: 4, first: 1, step: 2 };
        all.of_expert(&part).read_f32(0, &mut values);
        assert_eq!(values, [9.0, 11.0]);
    }
}

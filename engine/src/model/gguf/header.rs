//! The header of a GGUF file, versions 2 and 3: metadata, and the description of every tensor.
//!
//! A file is hostile until it is checked. Every length is compared with the bytes that are left before anything is
//! allocated, so that a header allocates in proportion to its own size. Every tensor lies inside the file, and no two
//! share a byte.
//!
//! Format: magic, version, number of tensors, number of values; the values (key, type, value); the tensors (name,
//! dimensions from the innermost, type, offset); padding to the alignment; data. Numbers are little-endian.

use std::collections::{BTreeMap, HashSet};

use crate::model::ModelError;
use crate::model::quantized::ggml::GgmlType;

/// Most values: a released file has some tens.
const MAX_VALUES: usize = 1 << 16;
/// Most tensors: ten for each of 1024 layers and their experts' stay far below.
const MAX_TENSORS: usize = 1 << 18;
/// Longest name of a value or tensor. ggml itself stops at 64 for tensors.
const MAX_NAME_BYTES: usize = 256;
/// Most dimensions of a tensor, as in ggml.
const MAX_DIMENSIONS: usize = 4;
/// Largest alignment of the data. Released files have 32.
const MAX_ALIGNMENT: usize = 1 << 16;
const DEFAULT_ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

const TYPE_F32: u32 = 6;
const TYPE_FLAG: u32 = 7;
const TYPE_TEXT: u32 = 8;
const TYPE_ARRAY: u32 = 9;
const TYPE_F64: u32 = 12;

/// The header of one file.
#[derive(Debug)]
pub(super) struct GgufHeader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    values: BTreeMap<&'a str, GgufValue<'a>>,
    tensors: Vec<GgufTensor<'a>>,
}

/// One value of the metadata.
#[derive(Clone, Copy, Debug)]
enum GgufValue<'a> {
    Whole(i128),
    Number(f64),
    Flag(bool),
    Text(&'a str),
    Array(GgufArray<'a>),
}

/// An array of the metadata, whose bytes have been checked to be there. Arrays of arrays are refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgufArray<'a> {
    kind: u32,
    len: usize,
    bytes: &'a [u8],
}

/// The description of one tensor.
#[derive(Debug)]
pub(super) struct GgufTensor<'a> {
    /// Its name in the file.
    pub(super) name: &'a str,
    /// Element type.
    pub(super) kind: GgmlType,
    /// Its shape, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// First byte in the file.
    pub(super) start: usize,
    /// End in the file.
    pub(super) end: usize,
}

impl<'a> GgufHeader<'a> {
    /// Reads the header of a file with this name and contents.
    ///
    /// # Errors
    /// [`ModelError::Malformed`]; [`ModelError::Unsupported`] for a version, a byte order or a tensor type.
    pub(super) fn read(file: &'a str, bytes: &'a [u8]) -> Result<Self, ModelError> {
        let mut cursor = Cursor { file, bytes, at: 0 };
        if cursor.take(4)? != b"GGUF" {
            return Err(cursor.malformed("is not a GGUF file: it does not begin with GGUF".into()));
        }
        match cursor.u32()? {
            2 | 3 => {}
            // A version of a file of the other byte order is far above any real one.
            version if version.swap_bytes() < 1 << 16 => {
                return Err(unsupported(file, "big-endian GGUF", "supported: little-endian"));
            }
            version => {
                let what = format!("GGUF version {version}");
                return Err(unsupported(file, &what, "supported: 2, 3; convert the model again"));
            }
        }
        let tensors = cursor.count("tensors", MAX_TENSORS)?;
        let count = cursor.count("values", MAX_VALUES)?;
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let name = cursor.name()?;
            let kind = cursor.u32()?;
            let value = cursor.value(name, kind)?;
            if values.insert(name, value).is_some() {
                return Err(cursor.malformed(format!("{name} appears twice")));
            }
        }
        let mut header = Self { file, bytes, values, tensors: Vec::new() };
        let alignment = header.size(ALIGNMENT_KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(cursor.malformed(format!(
                "{ALIGNMENT_KEY} {alignment} is not a power of two up to {MAX_ALIGNMENT}"
            )));
        }
        let mut described = Vec::new();
        for _ in 0..tensors {
            described.push(cursor.tensor(alignment)?);
        }
        // Tensors without data have no start. A file of metadata only may end before the padding.
        let start = cursor.at.next_multiple_of(alignment);
        let mut names = HashSet::new();
        for tensor in &mut described {
            let end = tensor.end.checked_add(start).filter(|end| *end <= bytes.len());
            let Some(end) = end else {
                return Err(cursor.malformed(format!("tensor {} ends after the file", tensor.name)));
            };
            (tensor.start, tensor.end) = (tensor.start + start, end);
            if !names.insert(tensor.name) {
                return Err(cursor.malformed(format!("tensor {} appears twice", tensor.name)));
            }
        }
        header.tensors = described;
        header.refuse_shared_bytes()?;
        Ok(header)
    }

    /// Refuses tensors that share bytes, as llama.cpp does. A small file could describe a model of any size with them.
    fn refuse_shared_bytes(&self) -> Result<(), ModelError> {
        let mut ranges: Vec<(usize, usize, &str)> =
            self.tensors.iter().map(|tensor| (tensor.start, tensor.end, tensor.name)).collect();
        ranges.sort_unstable();
        match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            None => Ok(()),
            Some(pair) => Err(self.malformed(format!("tensors {} and {} share bytes", pair[0].2, pair[1].2))),
        }
    }

    /// The tensors of the file.
    pub(super) fn tensors(&self) -> &[GgufTensor<'a>] {
        &self.tensors
    }

    /// A tensor, by its name in the file.
    pub(super) fn tensor(&self, name: &str) -> Option<&GgufTensor<'a>> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The stored bytes of a tensor of this file.
    pub(super) fn bytes(&self, tensor: &GgufTensor<'_>) -> &'a [u8] {
        &self.bytes[tensor.start..tensor.end]
    }

    /// A whole number from 0.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for another type or a negative number.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number from 0", |value| match value {
            GgufValue::Whole(number) => usize::try_from(number).ok(),
            _ => None,
        })
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for another type.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a finite number", |value| match value {
            GgufValue::Whole(number) => Some(number as f64),
            GgufValue::Number(number) => Some(number).filter(|number| number.is_finite()),
            _ => None,
        })
    }

    /// True or false.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for another type.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", |value| match value {
            GgufValue::Flag(flag) => Some(flag),
            _ => None,
        })
    }

    /// A text.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for another type.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a text", |value| match value {
            GgufValue::Text(text) => Some(text),
            _ => None,
        })
    }

    /// An array.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for another type.
    pub(super) fn array(&self, key: &str) -> Result<Option<GgufArray<'a>>, ModelError> {
        self.typed(key, "an array", |value| match value {
            GgufValue::Array(array) => Some(array),
            _ => None,
        })
    }

    pub(super) fn malformed(&self, what: String) -> ModelError {
        ModelError::Malformed { file: self.file.to_owned(), what }
    }

    pub(super) fn unsupported(&self, what: &str, supported: &str) -> ModelError {
        unsupported(self.file, what, supported)
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl Fn(GgufValue<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        read(*value).map(Some).ok_or_else(|| self.malformed(format!("{key} is not {wanted}")))
    }
}

impl<'a> GgufArray<'a> {
    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The texts of an array of texts. `None` for another type, or a text that is not UTF-8.
    pub(super) fn texts(&self) -> Option<Vec<&'a str>> {
        if self.kind != TYPE_TEXT {
            return None;
        }
        let mut cursor = Cursor { file: "", bytes: self.bytes, at: 0 };
        (0..self.len).map(|_| cursor.text().ok()).collect()
    }

    /// The elements of an array of whole numbers.
    pub(super) fn wholes(&self) -> Option<Vec<i128>> {
        self.numbers(|value| match value {
            GgufValue::Whole(number) => Some(number),
            _ => None,
        })
    }

    /// The elements of an array of numbers, as f32.
    pub(super) fn floats(&self) -> Option<Vec<f32>> {
        self.numbers(|value| match value {
            GgufValue::Number(number) => Some(number as f32),
            GgufValue::Whole(number) => Some(number as f32),
            _ => None,
        })
    }

    fn numbers<T>(&self, read: impl Fn(GgufValue<'a>) -> Option<T>) -> Option<Vec<T>> {
        scalar_bytes(self.kind)?;
        let mut cursor = Cursor { file: "", bytes: self.bytes, at: 0 };
        (0..self.len).map(|_| cursor.scalar(self.kind).ok().flatten().and_then(&read)).collect()
    }
}

fn unsupported(file: &str, what: &str, supported: &str) -> ModelError {
    ModelError::Unsupported { file: file.to_owned(), what: what.to_owned(), supported: supported.to_owned() }
}

/// Bytes of a value with a fixed size. `None` for texts, arrays and unknown types.
fn scalar_bytes(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | TYPE_FLAG => Some(1),
        2 | 3 => Some(2),
        4 | 5 | TYPE_F32 => Some(4),
        10 | 11 | TYPE_F64 => Some(8),
        _ => None,
    }
}

/// A position in a file.
struct Cursor<'a> {
    file: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn malformed(&self, what: String) -> ModelError {
        ModelError::Malformed { file: self.file.to_owned(), what }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ModelError> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else {
            return Err(
                self.malformed(format!("ends within its header, which needs bytes after {}", self.at))
            );
        };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, ModelError> {
        let raw = self.take(4)?;
        Ok(u32::from_le_bytes(raw.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64, ModelError> {
        let raw = self.take(8)?;
        Ok(u64::from_le_bytes(raw.try_into().expect("8 bytes")))
    }

    /// A number of bytes or elements.
    fn len(&mut self) -> Result<usize, ModelError> {
        let len = self.u64()?;
        usize::try_from(len).map_err(|_| self.malformed(format!("a length of {len}")))
    }

    fn count(&mut self, what: &str, max: usize) -> Result<usize, ModelError> {
        let count = self.len()?;
        if count > max {
            return Err(self.malformed(format!("{count} {what}, more than {max}")));
        }
        Ok(count)
    }

    fn text(&mut self) -> Result<&'a str, ModelError> {
        let len = self.len()?;
        let at = self.at;
        let raw = self.take(len)?;
        std::str::from_utf8(raw).map_err(|_| self.malformed(format!("the text at byte {at} is not UTF-8")))
    }

    fn name(&mut self) -> Result<&'a str, ModelError> {
        let name = self.text()?;
        if name.len() > MAX_NAME_BYTES {
            return Err(self.malformed(format!("a name of {} bytes, more than {MAX_NAME_BYTES}", name.len())));
        }
        Ok(name)
    }

    fn value(&mut self, name: &str, kind: u32) -> Result<GgufValue<'a>, ModelError> {
        match kind {
            TYPE_TEXT => self.text().map(GgufValue::Text),
            TYPE_ARRAY => self.array(name).map(GgufValue::Array),
            _ => match self.scalar(kind)? {
                Some(value) => Ok(value),
                None => Err(self.malformed(format!("{name} has the unknown type {kind}"))),
            },
        }
    }

    /// A value of a fixed size; `None` for another type.
    fn scalar(&mut self, kind: u32) -> Result<Option<GgufValue<'a>>, ModelError> {
        let Some(size) = scalar_bytes(kind) else { return Ok(None) };
        let raw = self.take(size)?;
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(raw);
        let unsigned = u64::from_le_bytes(wide);
        let value = match kind {
            TYPE_FLAG => GgufValue::Flag(unsigned != 0),
            TYPE_F32 => GgufValue::Number(decimal(f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]))),
            TYPE_F64 => GgufValue::Number(f64::from_le_bytes(wide)),
            0 | 2 | 4 | 10 => GgufValue::Whole(i128::from(unsigned)),
            _ => {
                // The sign is the uppermost bit of the value's own size.
                let unused = 64 - 8 * size as u32;
                GgufValue::Whole(i128::from((unsigned << unused).cast_signed() >> unused))
            }
        };
        Ok(Some(value))
    }

    fn array(&mut self, name: &str) -> Result<GgufArray<'a>, ModelError> {
        let kind = self.u32()?;
        let len = self.len()?;
        let start = self.at;
        match (kind, scalar_bytes(kind)) {
            (_, Some(size)) => {
                let bytes = len.checked_mul(size).ok_or_else(|| {
                    self.malformed(format!("{name} has {len} elements, more than the file has bytes"))
                })?;
                self.take(bytes)?;
            }
            (TYPE_TEXT, None) => {
                // Each text takes 8 bytes for its length, so a false count ends at the end of the file.
                for _ in 0..len {
                    let text = self.len()?;
                    self.take(text)?;
                }
            }
            (_, None) => {
                return Err(self.malformed(format!("{name} is an array of the unknown type {kind}")));
            }
        }
        Ok(GgufArray { kind, len, bytes: &self.bytes[start..self.at] })
    }

    /// A tensor, whose range is relative to the start of the data.
    fn tensor(&mut self, alignment: usize) -> Result<GgufTensor<'a>, ModelError> {
        let (file, name) = (self.file, self.name()?);
        let wrong = |what: &str| ModelError::Malformed {
            file: file.to_owned(),
            what: format!("tensor {name} {what}"),
        };
        let dimensions = self.u32()? as usize;
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            return Err(wrong(&format!("has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")));
        }
        let mut shape = Vec::with_capacity(dimensions);
        for _ in 0..dimensions {
            shape.push(self.len()?);
        }
        let kind = GgmlType::of(self.u32()?).map_err(|kind| {
            unsupported(file, &format!("tensor {name} of type {kind}"), GgmlType::SUPPORTED)
        })?;
        let start = self.len()?;
        if shape.contains(&0) || !shape[0].is_multiple_of(kind.block_len()) {
            return Err(wrong(&format!("has shape {shape:?}, whose rows are not whole blocks")));
        }
        if !start.is_multiple_of(alignment) {
            return Err(wrong(&format!("begins at {start}, not at a multiple of {alignment}")));
        }
        let values = shape.iter().try_fold(1, |product: usize, size| product.checked_mul(*size));
        let bytes = values.and_then(|values| (values / kind.block_len()).checked_mul(kind.block_bytes()));
        let end = bytes.and_then(|bytes| start.checked_add(bytes));
        let end = end.ok_or_else(|| wrong(&format!("has shape {shape:?}, too large for any file")))?;
        shape.reverse();
        Ok(GgufTensor { name, kind, shape, start, end })
    }
}

/// The f64 with the shortest decimal that means this f32: 0.1 as it was written, not 0.10000000149.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

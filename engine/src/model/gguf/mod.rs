//! GGUF files: the metadata as the files of a Hugging Face checkpoint, and the tensors by the names of one.
//!
//! The rest of the engine reads `config.json`, `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.
//! [`GgufFiles::read`] writes their contents from the metadata, so that both kinds of checkpoints pass the same checks.
//! Headers are read from the mapped files whenever they are needed, and nothing of them is kept.
//!
//! A model that is divided into several files (`NAME-00001-of-00003.gguf`) is opened by its first file.

mod architecture;
mod header;
mod places;
mod pre_tokenizer;
mod vocabulary;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::ModelError;
use super::file_bytes::FileBytes;
use super::quantized::ggml::GgmlType;
use architecture::GgufModel;
use header::{GgufHeader, GgufTensor};
pub(super) use places::GgufChange;
use places::{PartPlace, TensorPlace};
use vocabulary::Vocabulary;

/// Most files of one model. The name has five digits for it; the largest released models have some tens.
const MAX_SHARDS: usize = 1024;
/// Most entries of one model. Experts have one for each matrix, and the largest released models have 70,000.
const MAX_ENTRIES: usize = 1 << 18;
/// The number of files of a model that is divided, in the metadata.
const SHARDS_KEY: &str = "split.count";

/// The files of one model, mapped.
#[derive(Debug)]
pub struct GgufFiles {
    /// Name and contents of each file, in order.
    shards: Vec<(String, FileBytes)>,
}

/// One tensor of a model.
#[derive(Debug)]
pub(super) struct GgufEntry {
    /// Its name in a Hugging Face checkpoint.
    pub(super) name: String,
    /// Index of its file.
    pub(super) shard: usize,
    /// Element type.
    pub(super) kind: GgmlType,
    /// Shape, outermost dimension first.
    pub(super) shape: Vec<usize>,
    /// First byte in the file.
    pub(super) start: usize,
    /// End in the file.
    pub(super) end: usize,
    /// What the converter of llama.cpp has changed.
    pub(super) change: GgufChange,
}

impl GgufFiles {
    /// Maps a file, and the other files of a model that is divided. The metadata is checked.
    ///
    /// # Errors
    /// [`ModelError`]: a file that is absent, unreadable or malformed, or a model that is not supported.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let map = |path: &Path, name: &str| {
            FileBytes::map(path)?.ok_or_else(|| ModelError::Missing(name.to_owned()))
        };
        let first = map(path, &name)?;
        let count = GgufHeader::read(&name, &first)?.size(SHARDS_KEY)?.unwrap_or(1);
        let mut shards = vec![(name, first)];
        if count > 1 {
            let name = &shards[0].0;
            let malformed = |what: String| ModelError::Malformed { file: name.clone(), what };
            if count > MAX_SHARDS {
                return Err(malformed(format!("{SHARDS_KEY} {count} is more than {MAX_SHARDS}")));
            }
            let stem = name.strip_suffix(&shard_end(1, count)).ok_or_else(|| {
                let end = shard_end(1, count);
                malformed(format!("is one of {count} files: name the first, which ends in {end}"))
            })?;
            let names: Vec<String> =
                (2..=count).map(|number| format!("{stem}{}", shard_end(number, count))).collect();
            for name in names {
                let bytes = map(&path.with_file_name(&name), &name)?;
                shards.push((name, bytes));
            }
        }
        Self::checked(shards)
    }

    /// One file with this name and these bytes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        Self::checked(vec![(name.to_owned(), FileBytes::Derived(bytes.into()))])
    }

    fn checked(shards: Vec<(String, FileBytes)>) -> Result<Self, ModelError> {
        let files = Self { shards };
        files.config()?;
        files.entries()?;
        Ok(files)
    }

    /// A file of the checkpoint: a GGUF file itself, or one that is written from the metadata. `Ok(None)` if there is
    /// no file of that name.
    ///
    /// # Errors
    /// [`ModelError`] for metadata that is malformed or not supported.
    pub fn read(&self, name: &str) -> Result<Option<FileBytes>, ModelError> {
        let value = match name {
            "config.json" => self.config()?,
            "generation_config.json" => self.generation()?,
            "tokenizer.json" => Vocabulary::read(&self.header(0)?)?.tokenizer()?,
            "tokenizer_config.json" => Vocabulary::read(&self.header(0)?)?.config()?,
            _ => {
                let shard = self.shards.iter().find(|(shard, _)| shard == name);
                return Ok(shard.map(|(_, bytes)| bytes.clone()));
            }
        };
        Ok(Some(FileBytes::Derived(value.to_string().into_bytes().into())))
    }

    /// Names of the files.
    pub(super) fn names(&self) -> Vec<String> {
        self.shards.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Where the tensors of a file begin, behind all metadata: the end of a file without tensors.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn header_end(&self, shard: usize) -> Result<usize, ModelError> {
        let first = self.header(shard)?.tensors().iter().map(|tensor| tensor.start).min();
        Ok(first.unwrap_or(self.shards[shard].1.len()))
    }

    /// The model's name: that of the first file, without extension and number.
    pub(super) fn model_name(&self) -> String {
        let name = &self.shards[0].0;
        let end = shard_end(1, self.shards.len());
        let name = name.strip_suffix(&end).or_else(|| name.strip_suffix(".gguf")).unwrap_or(name);
        if name.is_empty() { "model".to_owned() } else { name.to_owned() }
    }

    /// The tensors of all files, by the names of a Hugging Face checkpoint. Two tensors can have one name.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for a tensor that the model does not have.
    pub(super) fn entries(&self) -> Result<Vec<GgufEntry>, ModelError> {
        let headers = self.headers()?;
        let model = GgufModel::read(&headers)?;
        let mut entries = Vec::new();
        for (shard, header) in headers.iter().enumerate() {
            for tensor in header.tensors() {
                if let Some(place) = model.place(tensor)? {
                    let added =
                        if matches!(place.part, PartPlace::Experts { .. }) { tensor.shape[0] } else { 1 };
                    if entries.len() + added > MAX_ENTRIES {
                        return Err(ModelError::Malformed {
                            file: self.shards[shard].0.clone(),
                            what: format!("has more than {MAX_ENTRIES} matrices and vectors"),
                        });
                    }
                    self.add_entries(shard, tensor, &place, &mut entries)?;
                }
            }
        }
        Ok(entries)
    }

    /// Adds the entry of a tensor, or one for each expert of a tensor with all of them.
    fn add_entries(
        &self,
        shard: usize,
        tensor: &GgufTensor<'_>,
        place: &TensorPlace,
        entries: &mut Vec<GgufEntry>,
    ) -> Result<(), ModelError> {
        let (kind, shape) = (tensor.kind, &tensor.shape);
        let malformed = |what: String| ModelError::Malformed { file: self.shards[shard].0.clone(), what };
        let change = match place.part {
            PartPlace::Matrix | PartPlace::Experts { .. } => GgufChange::None,
            PartPlace::Norm(0.0) => GgufChange::None,
            PartPlace::Norm(offset) => {
                if shape.len() != 1 || kind.block_len() != 1 {
                    let name = tensor.name;
                    return Err(malformed(format!("tensor {name} has shape {shape:?}, not that of a norm")));
                }
                GgufChange::Raised(offset)
            }
            PartPlace::Heads(heads) => {
                // A row is moved as bytes, so it must be whole blocks: elements of one dimension are not.
                let has_rows = shape.len() == 2 || kind.block_len() == 1;
                if !has_rows || head_rows(shape[0], heads).is_none() {
                    let what =
                        format!("tensor {} has shape {shape:?}, which is not one of heads", tensor.name);
                    return Err(malformed(what));
                }
                GgufChange::HeadRows(heads)
            }
        };
        let entry = |name: String, shape: &[usize], start: usize, end: usize| GgufEntry {
            name,
            shard,
            kind,
            shape: shape.to_vec(),
            start,
            end,
            change,
        };
        match place.part {
            // `GgufModel::place` has compared the shape with the number of experts.
            PartPlace::Experts { matrix } => {
                let bytes = (tensor.end - tensor.start) / shape[0];
                for expert in 0..shape[0] {
                    let name = format!("{}.{expert}.{matrix}.weight", place.name);
                    let start = tensor.start + expert * bytes;
                    entries.push(entry(name, &shape[1..], start, start + bytes));
                }
            }
            _ => entries.push(entry(place.name.clone(), shape, tensor.start, tensor.end)),
        }
        Ok(())
    }

    fn header(&self, shard: usize) -> Result<GgufHeader<'_>, ModelError> {
        let (name, bytes) = &self.shards[shard];
        GgufHeader::read(name, bytes)
    }

    fn headers(&self) -> Result<Vec<GgufHeader<'_>>, ModelError> {
        (0..self.shards.len()).map(|shard| self.header(shard)).collect()
    }

    fn config(&self) -> Result<Value, ModelError> {
        let headers = self.headers()?;
        let vocabulary = Vocabulary::read(&headers[0])?;
        GgufModel::read(&headers)?.config(vocabulary.bos()?, &vocabulary.ends()?)
    }

    /// Default sampling parameters, which newer files contain.
    fn generation(&self) -> Result<Value, ModelError> {
        let header = self.header(0)?;
        let mut config = Map::new();
        for (key, field) in [
            ("temp", "temperature"),
            ("top_p", "top_p"),
            ("min_p", "min_p"),
            ("penalty_repeat", "repetition_penalty"),
        ] {
            if let Some(value) = header.number(&format!("general.sampling.{key}"))? {
                config.insert(field.to_owned(), json!(value));
            }
        }
        if let Some(top_k) = header.size("general.sampling.top_k")? {
            config.insert("top_k".to_owned(), json!(top_k));
        }
        Ok(Value::Object(config))
    }
}

/// Reads everything that a file with these bytes describes, for fuzzing. Returns whether it is a model.
#[must_use]
pub fn check(bytes: &[u8]) -> bool {
    let Ok(files) = GgufFiles::from_bytes("m.gguf", bytes) else { return false };
    let names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    let read = names.iter().all(|name| files.read(name).is_ok_and(|found| found.is_some()));
    for entry in files.entries().into_iter().flatten() {
        let bytes = &files.shards[entry.shard].1[entry.start..entry.end];
        let values: usize = entry.shape.iter().product();
        let (kind, bytes) = restored(entry.kind, entry.change, bytes, &entry.shape);
        kind.read_f32(&bytes, values - 1, &mut [0.0]);
    }
    read
}

/// The GGUF file of a folder: its only one, or the first of its only divided model. `None` if there is none.
pub(super) fn in_folder(folder: &Path) -> Result<Option<PathBuf>, ModelError> {
    let failed = |source| ModelError::File { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name.ends_with(".gguf") && (!is_shard(&name) || name.contains("-00001-of-")) {
            found.push(path);
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        several => Err(ModelError::Malformed {
            file: folder.display().to_string(),
            what: format!("contains {several} GGUF models: name the file"),
        }),
    }
}

/// A tensor as the original checkpoint has it: its type and bytes.
///
/// # Panics
/// For a change that does not fit the shape: [`GgufFiles::entries`] refuses such a tensor.
pub(super) fn restored<'a>(
    kind: GgmlType,
    change: GgufChange,
    bytes: &'a [u8],
    shape: &[usize],
) -> (GgmlType, Cow<'a, [u8]>) {
    match change {
        GgufChange::None => (kind, Cow::Borrowed(bytes)),
        GgufChange::HeadRows(heads) => (kind, Cow::Owned(rows_of_heads(bytes, shape[0], heads))),
        GgufChange::Raised(offset) => {
            let mut values = vec![0.0; shape[0]];
            kind.read_f32(bytes, 0, &mut values);
            let bytes = values.iter().flat_map(|value| (value - offset).to_le_bytes()).collect();
            (GgmlType::F32, Cow::Owned(bytes))
        }
    }
}

/// Row of a file's tensor for each row of the checkpoint's. `None` if `rows` are not whole heads of whole pairs.
///
/// llama.cpp rotates neighbouring rows, and the checkpoint rows that are half a head apart. Its converter therefore
/// stores row `p` of the first half of a head as row `2p`, and row `p` of the second half as row `2p + 1`.
fn head_rows(rows: usize, heads: usize) -> Option<impl Iterator<Item = usize>> {
    if heads == 0 || !rows.is_multiple_of(heads.checked_mul(2)?) {
        return None;
    }
    let head_dim = rows / heads;
    let half = head_dim / 2;
    Some((0..rows).map(move |row| {
        let (head, at) = (row / head_dim, row % head_dim);
        head * head_dim + at % half * 2 + at / half
    }))
}

/// The rows of a tensor in the checkpoint's order. A row is whole blocks, so its bytes are moved unchanged.
///
/// # Panics
/// When the rows are not those of so many heads: [`GgufFiles::entries`] refuses such a tensor.
fn rows_of_heads(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let size = bytes.len() / rows;
    let order = head_rows(rows, heads).expect("the shape is that of the file, which has been checked");
    order.flat_map(|row| &bytes[row * size..(row + 1) * size]).copied().collect()
}

/// The end of the name of one of several files.
fn shard_end(number: usize, count: usize) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

/// Whether a name ends like that of one of several files.
fn is_shard(name: &str) -> bool {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some((rest, count)) = name.strip_suffix(".gguf").and_then(|name| name.rsplit_once("-of-")) else {
        return false;
    };
    digits(count) && rest.rsplit_once('-').is_some_and(|(_, number)| digits(number))
}

#[cfg(test)]
mod tests;

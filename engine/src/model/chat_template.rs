//! A conversation to a prompt: the checkpoint's Jinja template, as Hugging Face renders it.
//!
//! Templates are programs from the checkpoint, and their data is untrusted. A render is bounded in steps (`FUEL`),
//! recursion (minijinja's 500) and output (`OUTPUT_BYTES_MAX`), and all errors of it become a 400.
//!
//! Extensions of Jinja, as in Hugging Face: `trim_blocks` and `lstrip_blocks`, Python's string methods, `tojson` that
//! escapes nothing for HTML (`json.rs`), `raise_exception`, `strftime_now` (`strftime.rs`), and loop controls.
//! `{% generation %}`, which marks text for training, has no effect.

mod json;
mod strftime;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::time::SystemTime;

use baton_openai::{ApiError, ChatInput, Code};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Value as Json;

use super::tokenizer::Tokenizer;
use super::{FileBytes, ModelError, ModelFiles};

/// Instructions of one render. A message needs some hundred; 4096 messages and 512 tools stay far below.
const FUEL: u64 = 20_000_000;
/// Bytes of a rendered prompt: twice the largest body, to have space for markup.
pub const OUTPUT_BYTES_MAX: usize = 64 << 20;
const FILE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";
/// Variables that requests must not set.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "raise_exception",
    "strftime_now",
];

/// A checkpoint's chat template, possibly absent. Immutable; can be shared.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Names of the templates: `default`, `tool_use`.
    names: Vec<String>,
    special_tokens: Vec<(String, String)>,
}

/// Why a conversation has no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The checkpoint has no chat template.
    #[error("the model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template refused the conversation with this message.
    #[error("{0}")]
    Raised(String),
    /// The template failed on the conversation.
    #[error("the chat template cannot render this conversation: {0}")]
    Failed(String),
    /// The prompt is longer than [`OUTPUT_BYTES_MAX`].
    #[error("the rendered conversation is over {OUTPUT_BYTES_MAX} bytes")]
    TooLong,
    /// `chat_template_kwargs` has a name that requests must not set.
    #[error("`chat_template_kwargs.{0}` cannot be set")]
    Reserved(String),
    /// `continue_final_message` is set, but the template does not render the last message unchanged.
    #[error(
        "`continue_final_message` is set, but the rendered conversation does not contain the last message"
    )]
    NothingToContinue,
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let param = match &error {
            ChatError::Reserved(_) => "chat_template_kwargs",
            ChatError::NothingToContinue => "continue_final_message",
            _ => "messages",
        };
        Self::invalid(param, error.to_string()).with_code(Code::ChatTemplate)
    }
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or otherwise `chat_template` of `tokenizer_config.json` (a string, or a list of
    /// named ones). A checkpoint without a template loads; its conversations are refused.
    ///
    /// # Errors
    /// The template exists but is not text, or not Jinja.
    pub fn load(files: &ModelFiles, tokenizer: &Tokenizer) -> Result<Self, ModelError> {
        let (file, sources) = match files.open(FILE)? {
            Some(bytes) => (FILE, vec![(DEFAULT.to_owned(), utf8(&bytes)?)]),
            None => (CONFIG, named(tokenizer.config().get("chat_template"))?),
        };
        let malformed = |error: &dyn fmt::Display| ModelError::Malformed {
            file: file.into(),
            what: format!("chat template: {error}"),
        };
        let mut environment = environment();
        let mut names = Vec::with_capacity(sources.len());
        for (name, source) in sources {
            let source = without_generation_tags(&source);
            environment.add_template_owned(name.clone(), source).map_err(|error| malformed(&error))?;
            names.push(name);
        }
        let special = tokenizer.names().iter();
        let special_tokens = special.map(|(name, token)| (name.clone(), token.clone())).collect();
        Ok(Self { environment, names, special_tokens })
    }

    /// Whether there is a template.
    #[must_use]
    pub fn is_present(&self) -> bool {
        !self.names.is_empty()
    }

    /// Renders a conversation. The result contains its special tokens, so it must be encoded without adding any.
    ///
    /// `now` is the time of `strftime_now`, in UTC.
    ///
    /// # Errors
    /// [`ChatError`]. The client or the checkpoint has to fix all of them.
    pub fn render(&self, chat: &ChatInput, now: SystemTime) -> Result<String, ChatError> {
        let name = self.pick(!chat.tools.is_empty()).ok_or(ChatError::NoTemplate)?;
        if let Some(name) = chat.template_kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
            return Err(ChatError::Reserved(name.clone()));
        }
        let template = self.environment.get_template(name).map_err(|error| failed(&error))?;
        let context = self.context(chat, prepared(&chat.messages, template.source()), now);
        let mut out = BoundedBuffer { bytes: Vec::new(), overflowed: false };
        let rendered = template.render_captured_to(context, &mut out).map(|_| ());
        if out.overflowed {
            return Err(ChatError::TooLong);
        }
        rendered.map_err(|error| failed(&error))?;
        let text = String::from_utf8(out.bytes).map_err(|error| ChatError::Failed(error.to_string()))?;
        if chat.continue_final_message { open_end(text, chat) } else { Ok(text) }
    }

    /// Whether a template's source contains a text.
    pub(crate) fn contains(&self, text: &str) -> bool {
        let template = |name: &String| self.environment.get_template(name);
        self.names.iter().filter_map(|name| template(name).ok()).any(|found| found.source().contains(text))
    }

    fn pick(&self, tools: bool) -> Option<&str> {
        let has = |name: &&str| self.names.iter().any(|known| known == name);
        let tool_use = Some(TOOL_USE).filter(|name| tools && has(name));
        tool_use.or(Some(DEFAULT).filter(has))
    }

    /// The template's variables. Absent tools and documents are `none`, as in Hugging Face, not undefined.
    fn context(&self, chat: &ChatInput, messages: Vec<Json>, now: SystemTime) -> Value {
        let list =
            |values: &[Json]| if values.is_empty() { Value::from(()) } else { Value::from(Serde(values)) };
        let special =
            self.special_tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.as_str())));
        let extra =
            chat.template_kwargs.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value))));
        let ours = [
            ("messages", Value::from(Serde(&messages))),
            ("tools", list(&chat.tools)),
            ("documents", list(&chat.documents)),
            ("add_generation_prompt", Value::from(chat.add_generation_prompt)),
            ("strftime_now", Value::from_function(move |format: &str| strftime::strftime(format, now))),
        ];
        let ours = ours.into_iter().map(|(name, value)| (name.to_owned(), value));
        Value::from(special.chain(extra).chain(ours).collect::<BTreeMap<String, Value>>())
    }
}

/// The messages in the form of a template with this source.
///
/// - OpenAI renamed `system` to `developer`. A template without the new name would drop the message or refuse it.
/// - A message with calls and without text has `content` `none` in Hugging Face. Templates that compare with it
///   (DeepSeek V3) would drop the calls or repeat the turn otherwise. For the others it is empty, as in vLLM.
/// - The arguments of calls are objects. Templates that add them to a text (DeepSeek's) get JSON.
fn prepared(messages: &[Json], source: &str) -> Vec<Json> {
    let knows_developer = source.contains("developer");
    let has = |name: &str, after: &str| {
        [format!(".{name}{after}"), format!("['{name}']{after}"), format!("[\"{name}\"]{after}")]
            .iter()
            .any(|text| source.contains(text))
    };
    let knows_none = has("content", " is none") || has("content", " is not none");
    let adds_arguments = has("arguments", " +");
    let prepare = |message: &Json| {
        let mut message = message.clone();
        if !knows_developer && message["role"] == "developer" {
            message["role"] = Json::from("system");
        }
        if knows_none && message["content"] == "" && message.get("tool_calls").is_some() {
            message["content"] = Json::Null;
        }
        let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
        for call in calls.into_iter().flatten().filter(|_| adds_arguments) {
            let arguments = &mut call["function"]["arguments"];
            *arguments = Json::from(json::dumps(arguments));
        }
        message
    };
    messages.iter().map(prepare).collect()
}

/// Removes the text that the template wrote after the last message's content, as Hugging Face does.
fn open_end(mut text: String, chat: &ChatInput) -> Result<String, ChatError> {
    let last = chat.messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
    let trimmed = last.trim();
    let start = text.rfind(trimmed).filter(|_| !trimmed.is_empty()).ok_or(ChatError::NothingToContinue)?;
    // The template may have kept the space at the end of the message.
    let kept = last.trim_start();
    let len = if text[start..].starts_with(kept) { kept.len() } else { trimmed.len() };
    text.truncate(start + len);
    Ok(text)
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the delimiters are Jinja's own"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// An error of `raise_exception`, to distinguish it from errors of the template itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedError(String);

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template")
        .with_source(RaisedError(message.to_owned())))
}

/// The error with a message of Baton or of the template: minijinja's display would show template source.
fn failed(error: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(RaisedError(message)) = current.downcast_ref() {
            return ChatError::Raised(message.clone());
        }
        cause = current.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::Failed("it takes too many steps".to_owned());
    }
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    ChatError::Failed(format!("{}: {}{line}", error.kind(), error.detail().unwrap_or("no detail")))
}

fn utf8(bytes: &FileBytes) -> Result<String, ModelError> {
    let text = std::str::from_utf8(bytes).map(str::to_owned);
    text.map_err(|error| ModelError::Malformed { file: FILE.into(), what: error.to_string() })
}

/// `chat_template` of `tokenizer_config.json`: a string, or `[{"name": …, "template": …}]`.
fn named(value: Option<&Json>) -> Result<Vec<(String, String)>, ModelError> {
    let malformed = |what: &str| ModelError::Malformed { file: CONFIG.into(), what: what.to_owned() };
    match value {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::String(source)) => Ok(vec![(DEFAULT.to_owned(), source.clone())]),
        Some(Json::Array(entries)) => {
            let entry = |entry: &Json| {
                let field = |name: &str| entry.get(name).and_then(Json::as_str).map(str::to_owned);
                field("name").zip(field("template"))
            };
            let entries = entries.iter().map(entry).collect::<Option<Vec<_>>>();
            entries.ok_or_else(|| malformed("`chat_template` lists entries other than named templates"))
        }
        Some(_) => Err(malformed("`chat_template` is neither a string nor a list")),
    }
}

/// Reads `{% generation %}` as `{% if true %}`: same whitespace, no effect.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(close) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (inside, after) = (&tag[2..close], &tag[close..]);
        out.push_str("{%");
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&inside.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&inside.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(inside),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A buffer that refuses to grow over [`OUTPUT_BYTES_MAX`].
struct BoundedBuffer {
    bytes: Vec<u8>,
    overflowed: bool,
}

impl Write for BoundedBuffer {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + buffer.len() > OUTPUT_BYTES_MAX {
            self.overflowed = true;
            return Err(io::Error::other("the rendered conversation is too long"));
        }
        self.bytes.extend_from_slice(buffer);
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tool_tests;

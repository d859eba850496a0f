//! `messages` and the related fields, in the form that chat templates read.
//!
//! Messages stay JSON objects, because templates may read any other field (`reasoning_content`, `name`). As in vLLM for
//! text models, content parts are joined with newlines, absent content becomes `""`, and the arguments of tool calls
//! become objects.

use serde_json::{Map, Value};

use crate::code::Code;
use crate::error::{ApiError, shortened};
use crate::field::{Fields, must_be};
use crate::limits::{ParseLimits, Scope, TREE_BYTES_MAX};
use crate::scan::tree_bytes;

pub(crate) const ROLES: [&str; 5] = ["developer", "system", "user", "assistant", "tool"];

/// Values of `reasoning_effort`: OpenAI's, and vLLM's `max`.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Tool calls of one message.
pub(crate) const TOOL_CALLS_MAX: usize = 128;

/// A conversation and the inputs of its template.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatInput {
    /// Objects with `role` (one of five) and `content` (a string); at least one.
    pub messages: Vec<Value>,
    /// Tools in the prompt; empty without tools or if `tool_choice` is none.
    pub tools: Vec<Value>,
    /// The client's choice of tools.
    pub tool_choice: ToolChoice,
    /// Whether a reply may have several calls of tools. Default true.
    pub parallel_tool_calls: bool,
    /// Whether the reply contains the model's reasoning (vLLM's extension). Default true.
    pub include_reasoning: bool,
    /// Documents for templates that read them.
    pub documents: Vec<Value>,
    /// Extra variables of the template, such as `enable_thinking`.
    pub template_kwargs: Map<String, Value>,
    /// Whether the template opens the assistant's turn. Default true.
    pub add_generation_prompt: bool,
    /// Whether the last message is continued instead of closed.
    pub continue_final_message: bool,
}

/// `tool_choice`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The prompt contains no tools.
    None,
    /// The model calls at least one of the tools.
    Required,
    /// The model calls this function.
    Function(String),
}

pub(super) fn read(fields: Fields<'_>, limits: &ParseLimits) -> Result<ChatInput, ApiError> {
    let messages = fields.array("messages", limits.messages)?;
    let messages = messages.ok_or_else(|| ApiError::invalid("messages", "`messages` is missing"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty"));
    }
    // The arguments are strings in the bounded tree of the body, and become trees here.
    if arguments(messages).map(tree_bytes).fold(0, usize::saturating_add) > TREE_BYTES_MAX {
        let message = "the arguments of the tool calls in `messages` have too many values";
        return Err(ApiError::invalid("messages", message).with_code(Code::TooManyValues));
    }
    let turn = turn_options(fields, limits.scope)?;
    let TurnOptions { continue_final_message, add_generation_prompt, tool_choice, .. } = turn;
    let tools = objects(fields, "tools", limits)?;
    has_tools_of(&tool_choice, &tools)?;
    Ok(ChatInput {
        messages: messages
            .iter()
            .enumerate()
            .map(|(i, m)| message(i, m, limits.scope))
            .collect::<Result<_, _>>()?,
        tools: if tool_choice == ToolChoice::None { Vec::new() } else { tools },
        tool_choice,
        parallel_tool_calls: turn.parallel_tool_calls,
        include_reasoning: turn.include_reasoning,
        documents: objects(fields, "documents", limits)?,
        template_kwargs: template_kwargs(fields, limits.scope)?,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
    })
}

/// Arguments of tool calls, which are JSON in strings.
fn arguments(messages: &[Value]) -> impl Iterator<Item = &str> {
    let calls = messages.iter().filter_map(|message| message.get("tool_calls")?.as_array()).flatten();
    calls.filter_map(|call| call.get("function")?.get("arguments")?.as_str())
}

/// The options for the continuation of a conversation.
pub(super) struct TurnOptions {
    continue_final_message: bool,
    add_generation_prompt: Option<bool>,
    tool_choice: ToolChoice,
    parallel_tool_calls: bool,
    include_reasoning: bool,
}

pub(super) fn turn_options(fields: Fields<'_>, scope: Scope) -> Result<TurnOptions, ApiError> {
    let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.boolean("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message = "`continue_final_message` and `add_generation_prompt` cannot both be true";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    reasoning_effort(fields, scope)?;
    Ok(TurnOptions {
        continue_final_message,
        add_generation_prompt,
        tool_choice: tool_choice(fields, scope)?,
        parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        include_reasoning: fields.boolean("include_reasoning")?.unwrap_or(true),
    })
}

/// The variables of the template. `reasoning_effort` is one, and turns thinking on or off, unless the client sets them
/// (as in vLLM).
fn template_kwargs(fields: Fields<'_>, scope: Scope) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    if let Some(effort) = reasoning_effort(fields, scope)? {
        kwargs.entry("reasoning_effort").or_insert_with(|| effort.into());
        kwargs.entry("enable_thinking").or_insert_with(|| (effort != "none").into());
    }
    Ok(kwargs)
}

fn reasoning_effort(fields: Fields<'_>, scope: Scope) -> Result<Option<&str>, ApiError> {
    let effort = fields.string("reasoning_effort")?;
    match effort.filter(|effort| scope == Scope::ThisEngine && !EFFORTS.contains(effort)) {
        Some(other) => {
            let expected = "none, minimal, low, medium, high, xhigh or max";
            Err(must_be("reasoning_effort", expected, &Value::from(other)))
        }
        None => Ok(effort),
    }
}

fn objects(fields: Fields<'_>, name: &str, limits: &ParseLimits) -> Result<Vec<Value>, ApiError> {
    let values = fields.array(name, limits.tools)?.unwrap_or_default();
    if let Some((index, wrong)) = values.iter().enumerate().find(|(_, value)| !value.is_object()) {
        return Err(must_be(&format!("{name}[{index}]"), "an object", wrong));
    }
    Ok(values.to_vec())
}

fn tool_choice(fields: Fields<'_>, scope: Scope) -> Result<ToolChoice, ApiError> {
    let Some(value) = fields.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let expected = "\"auto\", \"none\", \"required\" or a function";
    let choice = match value {
        Value::String(choice) if choice == "auto" => ToolChoice::Auto,
        Value::String(choice) if choice == "none" => ToolChoice::None,
        Value::String(_) | Value::Object(_) if scope == Scope::AnyEngine => ToolChoice::Auto,
        Value::String(choice) if choice == "required" => ToolChoice::Required,
        Value::Object(choice) if choice.get("type").is_some_and(|kind| kind == "function") => {
            let name = choice.get("function").and_then(|function| function.get("name")?.as_str());
            ToolChoice::Function(name.ok_or_else(|| must_be("tool_choice", expected, value))?.to_owned())
        }
        other => return Err(must_be("tool_choice", expected, other).with_code(Code::UnsupportedParameter)),
    };
    Ok(choice)
}

/// A call can be forced only of tools of the request.
fn has_tools_of(choice: &ToolChoice, tools: &[Value]) -> Result<(), ApiError> {
    let message = match choice {
        ToolChoice::Required if tools.is_empty() => {
            "`tool_choice` is required, but there are no `tools`".to_owned()
        }
        ToolChoice::Function(name) if !tools.iter().any(|tool| tool["function"]["name"] == name.as_str()) => {
            format!("`tool_choice` names the function `{}`, which is not in `tools`", shortened(name))
        }
        ToolChoice::Auto | ToolChoice::None | ToolChoice::Required | ToolChoice::Function(_) => return Ok(()),
    };
    Err(ApiError::invalid("tool_choice", message))
}

fn message(index: usize, value: &Value, scope: Scope) -> Result<Value, ApiError> {
    let path = format!("messages[{index}]");
    let Some(map) = value.as_object() else { return Err(must_be(&path, "an object", value)) };
    let fields = Fields::under(map, &path);
    let role = fields.string("role")?;
    let role =
        role.ok_or_else(|| ApiError::invalid(fields.name("role"), format!("`{path}.role` is missing")))?;
    if scope == Scope::ThisEngine && !ROLES.contains(&role) {
        let expected = "developer, system, user, assistant or tool";
        return Err(must_be(&fields.name("role"), expected, &map["role"]));
    }
    let mut out = map.clone();
    let text = content(fields, role, scope)?;
    out.insert("content".to_owned(), Value::String(text));
    match fields.array("tool_calls", scope.most(TOOL_CALLS_MAX))? {
        Some([]) | None => drop(out.shift_remove("tool_calls")),
        Some(calls) => {
            out.insert("tool_calls".to_owned(), Value::Array(tool_calls(calls, &path)?));
        }
    }
    // Both names of a message's reasoning reach the template.
    for (name, other) in [("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")] {
        if let (Some(text @ Value::String(_)), None) = (fields.get(name), fields.get(other)) {
            out.insert(other.to_owned(), text.clone());
        }
    }
    Ok(Value::Object(out))
}

/// The text of a message. Only an assistant message with tool calls may have none.
fn content(fields: Fields<'_>, role: &str, scope: Scope) -> Result<String, ApiError> {
    let name = fields.name("content");
    match fields.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(index, value)| part(&format!("{name}[{index}]"), value, scope);
            let texts = parts.iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
            Ok(texts.join("\n"))
        }
        Some(other) => Err(must_be(&name, "a string or an array of text parts", other)),
        None if role == "assistant" => Ok(String::new()),
        None => Err(ApiError::invalid(name.as_str(), format!("`{name}` is missing"))),
    }
}

fn part(name: &str, value: &Value, scope: Scope) -> Result<String, ApiError> {
    if let Value::String(text) = value {
        return Ok(text.clone());
    }
    let Some(map) = value.as_object() else { return Err(must_be(name, "an object with `type`", value)) };
    let fields = Fields::under(map, name);
    let absent = |field: &str| ApiError::invalid(fields.name(field), format!("`{name}.{field}` is missing"));
    match fields.string("type")?.ok_or_else(|| absent("type"))? {
        kind @ ("text" | "refusal") => Ok(fields.string(kind)?.ok_or_else(|| absent(kind))?.to_owned()),
        _ if scope == Scope::AnyEngine => Ok(String::new()),
        other => {
            let message = format!("`{name}` is of type `{}`; this model reads text only", shortened(other));
            Err(ApiError::invalid(fields.name("type"), message).with_code(Code::UnsupportedContent))
        }
    }
}

/// Tool calls with their arguments as objects: OpenAI sends JSON in a string, templates need the value.
fn tool_calls(calls: &[Value], path: &str) -> Result<Vec<Value>, ApiError> {
    let read = |(index, call): (usize, &Value)| {
        let name = format!("{path}.tool_calls[{index}]");
        let function = call.get("function").and_then(Value::as_object);
        let Some(function) = function.filter(|function| function.get("name").is_some_and(Value::is_string))
        else {
            return Err(must_be(&name, "an object with `function` that has a `name`", call));
        };
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => {
                serde_json::from_str::<Value>(text).ok().filter(Value::is_object).ok_or_else(|| {
                    let message = format!("`{name}.function.arguments` must be a JSON object in a string");
                    ApiError::invalid(format!("{name}.function.arguments"), message)
                })?
            }
            Some(object @ Value::Object(_)) => object.clone(),
            Some(other) => {
                return Err(must_be(
                    &format!("{name}.function.arguments"),
                    "a JSON object in a string",
                    other,
                ));
            }
        };
        let mut call = call.clone();
        call["function"]["arguments"] = arguments;
        Ok(call)
    };
    calls.iter().enumerate().map(read).collect()
}

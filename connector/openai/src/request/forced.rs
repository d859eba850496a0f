//! Forced calls of tools: `tool_choice` is `required` or names a function.
//!
//! The text of the response is then JSON, whatever format the model was trained for (as in vLLM): an array of calls, or
//! the arguments of the named function.

use serde_json::{Map, Value, json};

use super::chat::{ChatInput, ToolChoice};

/// The JSON schema of a response's text; `None` if no call is forced. Functions without `parameters` take any object.
#[must_use]
pub fn forced_calls_schema(chat: &ChatInput) -> Option<Value> {
    match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::None => None,
        ToolChoice::Function(name) => {
            chat.tools.iter().find(|tool| tool["function"]["name"] == name.as_str()).map(parameters)
        }
        ToolChoice::Required => {
            let calls: Vec<Value> = chat.tools.iter().map(call).collect();
            let mut schema = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
            if !chat.parallel_tool_calls {
                schema["maxItems"] = json!(1);
            }
            Some(schema)
        }
    }
}

fn parameters(tool: &Value) -> Value {
    let parameters = tool["function"]["parameters"].as_object().filter(|schema| !schema.is_empty());
    Value::Object(
        parameters.cloned().unwrap_or_else(|| Map::from_iter([("type".to_owned(), json!("object"))])),
    )
}

fn call(tool: &Value) -> Value {
    json!({
        "type": "object",
        "properties": {"name": {"enum": [tool["function"]["name"]]}, "parameters": parameters(tool)},
        "required": ["name", "parameters"],
        "additionalProperties": false,
    })
}

//! Forced calls of tools: `tool_choice` is `required` or names a function.
//!
//! The text of the response is then JSON, whatever format the model was trained for (as in vLLM): an array of calls, or
//! the arguments of the named function.

use serde_json::{Map, Value, json};

use super::Input;
use super::chat::{ChatInput, ToolChoice};
use super::structured::{JsonWhitespace, StructuredOutput};
use crate::error::ApiError;
use crate::limits::Scope;

/// The members of a schema that its references name from its root.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// The constraint of a request: `given`, or that of its forced calls.
pub(super) fn constraint(
    input: &Input,
    given: Option<StructuredOutput>,
    scope: Scope,
) -> Result<Option<StructuredOutput>, ApiError> {
    let Input::Chat(chat) = input else { return Ok(given) };
    if scope == Scope::AnyEngine {
        return Ok(given);
    }
    let Some(schema) = forced_calls_schema(chat)? else { return Ok(given) };
    if let Some(given) = given {
        let message = format!("`tool_choice` forces a call, which `{}` excludes", given.field);
        return Err(ApiError::invalid("tool_choice", message));
    }
    // A small model could spend its tokens on whitespace.
    StructuredOutput::of_schema("tools", schema, JsonWhitespace::Omitted).map(Some)
}

/// The JSON schema of a response's text; `None` if no call is forced. Functions without `parameters` take any object.
fn forced_calls_schema(chat: &ChatInput) -> Result<Option<Value>, ApiError> {
    Ok(match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::None => None,
        ToolChoice::Function(name) => {
            chat.tools.iter().find(|tool| tool["function"]["name"] == name.as_str()).map(parameters)
        }
        ToolChoice::Required => {
            let mut schema = json!({"type": "array", "minItems": 1});
            let mut calls: Vec<Value> = chat.tools.iter().map(call).collect();
            for (index, call) in calls.iter_mut().enumerate() {
                move_definitions(index, &mut call["properties"]["parameters"], &mut schema)?;
            }
            schema["items"] = json!({"anyOf": calls});
            if !chat.parallel_tool_calls {
                schema["maxItems"] = json!(1);
            }
            Some(schema)
        }
    })
}

/// Moves the definitions of one function to the root, which its references mean.
fn move_definitions(index: usize, parameters: &mut Value, root: &mut Value) -> Result<(), ApiError> {
    for place in DEFINITIONS {
        let Some(Value::Object(own)) = parameters.as_object_mut().and_then(|members| members.remove(place))
        else {
            continue;
        };
        for (name, definition) in own {
            let known = &mut root[place][name.as_str()];
            if !known.is_null() && *known != definition {
                let field = format!("tools[{index}].function.parameters.{place}.{name}");
                let message = format!("`{field}` differs from the definition of another function");
                return Err(ApiError::invalid(field, message));
            }
            *known = definition;
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ParseLimits;
    use crate::request::{Endpoint, GenerateRequest, OutputConstraint};

    fn read(changes: &Value) -> Result<Option<StructuredOutput>, ApiError> {
        let place = |name: &str| {
            json!({"type": "object", "properties": {"in": {"$ref": "#/$defs/place"}},
                "$defs": {"place": {"enum": [name]}}})
        };
        let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}],
            "tools": [tool("weather", place("Paris")), tool("time", json!({}))]});
        for (name, value) in changes.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let map = body.as_object().expect("an object");
        GenerateRequest::from_map(Endpoint::Chat, map, &ParseLimits::default()).map(|read| read.structured)
    }

    fn schema(changes: &Value) -> Value {
        match read(changes).expect("sound").expect("a constraint").constraint {
            OutputConstraint::Json { schema, .. } => schema,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_forced_call_is_a_constraint() {
        assert_eq!(read(&json!({})), Ok(None));
        let named = json!({"tool_choice": {"type": "function", "function": {"name": "time"}}});
        assert_eq!(schema(&named), json!({"type": "object"}));
        let call = |name: &str, parameters: Value| {
            json!({"type": "object", "properties": {"name": {"enum": [name]}, "parameters": parameters},
                "required": ["name", "parameters"], "additionalProperties": false})
        };
        let weather = json!({"type": "object", "properties": {"in": {"$ref": "#/$defs/place"}}});
        let calls = json!([call("weather", weather), call("time", json!({"type": "object"}))]);
        let mut wanted = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls},
            "$defs": {"place": {"enum": ["Paris"]}}});
        assert_eq!(schema(&json!({"tool_choice": "required"})), wanted);
        wanted["maxItems"] = json!(1);
        assert_eq!(schema(&json!({"tool_choice": "required", "parallel_tool_calls": false})), wanted);
    }

    #[test]
    fn a_forced_call_excludes_another_constraint_and_another_meaning_of_a_definition() {
        let both = json!({"tool_choice": "required", "response_format": {"type": "json_object"}});
        let error = read(&both).expect_err("two constraints");
        assert_eq!(error.param.as_deref(), Some("tool_choice"));
        let parameters = |name: &str| json!({"type": "object", "$defs": {"place": {"enum": [name]}}});
        let tool = |name: &str| {
            let function = json!({"name": name, "parameters": parameters(name)});
            json!({"type": "function", "function": function})
        };
        let differ = json!({"tool_choice": "required", "tools": [tool("a"), tool("b")]});
        let error = read(&differ).expect_err("two places");
        assert_eq!(error.param.as_deref(), Some("tools[1].function.parameters.$defs.place"));
    }
}

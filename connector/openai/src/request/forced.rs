//! Forced calls of tools: `tool_choice` is `required` or names a function.
//!
//! The text of the response is then JSON, whatever format the model was trained for (as in vLLM): an array of calls, or
//! the arguments of the named function.

use serde_json::{Map, Value, json};

use super::Input;
use super::chat::{ChatInput, ToolChoice};
use super::structured::{JsonWhitespace, StructuredOutput};
use crate::error::{ApiError, shortened};
use crate::field::must_be;
use crate::limits::Scope;

/// The members of a schema that its references name from its root.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Bytes of the name of a function whose call is forced. OpenAI allows 64.
const NAME_BYTES_MAX: usize = 256;

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
            let mut tools = chat.tools.iter().enumerate();
            let Some((index, tool)) = tools.find(|(_, tool)| tool["function"]["name"] == name.as_str())
            else {
                return Ok(None);
            };
            function_name(index, tool)?;
            Some(parameters(tool))
        }
        ToolChoice::Required => {
            for (index, tool) in chat.tools.iter().enumerate() {
                check_references(function_name(index, tool)?, index, &tool["function"]["parameters"])?;
            }
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

/// The name of a tool's function. A response with another name would be no call.
fn function_name(index: usize, tool: &Value) -> Result<&str, ApiError> {
    let name = &tool["function"]["name"];
    let sound = |name: &&str| {
        (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(|c: char| c.is_control() || c == ' ')
    };
    let expected = format!("a name of 1 to {NAME_BYTES_MAX} bytes without spaces, if a call is forced");
    let wrong = || must_be(&format!("tools[{index}].function.name"), &expected, name);
    name.as_str().filter(sound).ok_or_else(wrong)
}

/// Refuses references of a function's parameters to anything but their definitions. They would mean another place in
/// the schema of all calls.
fn check_references(function: &str, index: usize, parameters: &Value) -> Result<(), ApiError> {
    let Some(target) = stray_reference(parameters, parameters) else { return Ok(()) };
    let message = format!(
        "the parameters of the function `{}` refer to `{}`; with `tool_choice` required, `$ref` must name a member of \
         their `$defs` or `definitions`",
        shortened(function),
        shortened(target)
    );
    Err(ApiError::invalid(format!("tools[{index}].function.parameters"), message))
}

/// A reference inside the parameters that names none of their definitions. The nesting of a body bounds the depth.
fn stray_reference<'a>(value: &'a Value, parameters: &Value) -> Option<&'a str> {
    match value {
        Value::Object(members) => members.iter().find_map(|(name, member)| match (name.as_str(), member) {
            ("$ref", Value::String(target)) if target.starts_with('#') => {
                Some(target.as_str()).filter(|target| !is_definition(target, parameters))
            }
            _ => stray_reference(member, parameters),
        }),
        Value::Array(items) => items.iter().find_map(|item| stray_reference(item, parameters)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

/// Whether a reference names one of these parameters' definitions, or a part of it.
fn is_definition(target: &str, parameters: &Value) -> bool {
    let Some((place, path)) = target.strip_prefix("#/").and_then(|path| path.split_once('/')) else {
        return false;
    };
    let name = path.split('/').next().unwrap_or_default();
    DEFINITIONS.contains(&place) && parameters[place].get(name).is_some()
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

    #[test]
    fn a_reference_outside_of_definitions_and_a_tool_without_a_name_are_refused() {
        let required = |function: Value| {
            let tools = json!([{"type": "function", "function": {"name": "first"}},
                {"type": "function", "function": function}]);
            read(&json!({"tool_choice": "required", "tools": tools}))
        };
        let parameters = |target: &str| {
            json!({"name": "second", "parameters": {
                "type": "object", "properties": {"a": {"anyOf": [{"$ref": target}]}},
                "$defs": {"place": {"items": {"type": "string"}}},
            }})
        };
        for target in ["#/$defs/place", "#/$defs/place/items"] {
            assert!(required(parameters(target)).is_ok(), "{target}");
        }
        for target in
            ["#", "#/", "#/properties/a", "#/$defs", "#/$defs/other", "#/definitions/place", "#place"]
        {
            let error = required(parameters(target)).expect_err(target);
            assert_eq!(error.param.as_deref(), Some("tools[1].function.parameters"), "{target}");
            assert!(
                error.message.contains("`second`") && error.message.contains(target),
                "{}",
                error.message
            );
        }
        // Alone, the parameters are the root.
        let named = json!({"tool_choice": {"type": "function", "function": {"name": "second"}},
            "tools": [{"type": "function", "function": parameters("#")}]});
        assert!(read(&named).is_ok());
        for function in [json!({}), json!({"name": ""}), json!({"name": 7}), json!({"name": "two words"})] {
            let error = required(function.clone()).expect_err("no name");
            assert_eq!(error.param.as_deref(), Some("tools[1].function.name"), "{function}");
        }
        let error = read(&json!({"tool_choice": "required", "tools": [{}]})).expect_err("no function");
        assert_eq!(error.param.as_deref(), Some("tools[0].function.name"));
        let named = json!({"tool_choice": {"type": "function", "function": {"name": "two words"}},
            "tools": [{"type": "function", "function": {"name": "two words"}}]});
        let error = read(&named).expect_err("two words");
        assert_eq!(error.param.as_deref(), Some("tools[0].function.name"));
    }
}

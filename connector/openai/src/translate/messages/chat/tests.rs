//! Requests as chats: the whole mapping, and what is refused.

use super::*;

fn chat(mut body: Value) -> Result<Value, ApiError> {
    let fields = body.as_object_mut().expect("an object");
    fields.entry("model").or_insert(json!("m"));
    fields.entry("max_tokens").or_insert(json!(8));
    to_chat(fields).map(Value::Object)
}

fn messages(turns: Value) -> Value {
    chat(json!({"messages": turns})).expect("a chat")["messages"].clone()
}

#[test]
fn texts_and_sampling_keep_their_meaning() {
    let found = chat(json!({
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "temperature": 0.5, "top_k": 3, "stream": true, "stop_sequences": ["END"], "service_tier": "auto",
        "metadata": {"user_id": "u"},
    }));
    let expected = json!({
        "model": "m", "max_tokens": 8, "stream": true, "temperature": 0.5, "top_k": 3,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stop": ["END"], "user": "u",
    });
    assert_eq!(found.expect("a chat"), expected);
}

#[test]
fn a_conversation_with_tools_is_translated_in_order() {
    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}});
    let turns = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "Here."},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}, image]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": true},
        ]},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}});
    let expected = json!([
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "reasoning_content": "hm",
            "tool_calls": [call("t1", "f", "{\"city\":\"Paris\"}"), call("t2", "g", "{}")]},
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [picture, {"type": "text", "text": "Here."}]},
    ]);
    assert_eq!(messages(turns), expected);
}

#[test]
fn tools_and_their_choice_have_the_forms_of_a_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let with = |choice: Value| {
        let found = chat(json!({
            "messages": [{"role": "user", "content": "x"}], "tool_choice": choice,
            "tools": [{"name": "f", "description": "d", "input_schema": schema, "strict": true}],
        }));
        found.expect("a chat")
    };
    let found = with(json!({"type": "any", "disable_parallel_tool_use": true}));
    let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
    assert_eq!(found["tools"], json!([{"type": "function", "function": function}]));
    assert_eq!((&found["tool_choice"], &found["parallel_tool_calls"]), (&json!("required"), &json!(false)));
    for (choice, expected) in [
        (json!({"type": "auto"}), json!("auto")),
        (json!({"type": "none"}), json!("none")),
        (json!({"type": "tool", "name": "f"}), json!({"type": "function", "function": {"name": "f"}})),
        (json!(null), json!(null)),
    ] {
        let found = with(choice);
        assert_eq!((&found["tool_choice"], found.get("parallel_tool_calls")), (&expected, None));
    }
}

#[test]
fn thinking_effort_and_formats_reach_template_and_grammar() {
    let user = json!([{"role": "user", "content": "x"}]);
    let kwargs = |thinking: Value, own: Value| {
        let body = json!({"messages": user, "thinking": thinking, "chat_template_kwargs": own});
        chat(body).expect("a chat").get("chat_template_kwargs").cloned()
    };
    let both = |on: bool| Some(json!({"enable_thinking": on, "thinking": on}));
    assert_eq!(kwargs(json!({"type": "enabled", "budget_tokens": 1024}), json!(null)), both(true));
    assert_eq!(kwargs(json!({"type": "disabled"}), json!(null)), both(false));
    assert_eq!(kwargs(json!(null), json!(null)), None);
    let own = kwargs(json!({"type": "adaptive"}), json!({"thinking": false}));
    assert_eq!(own, Some(json!({"enable_thinking": true, "thinking": false})), "the client's own wins");
    let budget = |thinking: Value| {
        let body = json!({"messages": user, "thinking": thinking, "max_tokens": 4096});
        chat(body).expect("a chat").get("thinking_token_budget").cloned()
    };
    assert_eq!(budget(json!({"type": "enabled", "budget_tokens": 1024})), Some(json!(1024)));
    assert_eq!(budget(json!({"type": "disabled", "budget_tokens": 1024})), None);
    for (asked, most, sent) in [
        (json!(1024), json!(1024), json!(1023)),
        (json!(2000), json!(1), json!(0)),
        (json!(1023), json!(1024), json!(1023)),
        (json!(2000), json!(0), json!(2000)),
        (json!("x"), json!(1024), json!("x")),
    ] {
        let thinking = json!({"type": "enabled", "budget_tokens": asked});
        let found = chat(json!({"messages": user, "thinking": thinking, "max_tokens": most}));
        assert_eq!(found.expect("a chat")["thinking_token_budget"], sent, "{asked} of {most}");
    }
    let config = json!({"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}});
    let found = chat(json!({"messages": user, "output_config": config})).expect("a chat");
    assert_eq!(found["reasoning_effort"], "high");
    assert_eq!(found["response_format"]["json_schema"]["schema"], json!({"type": "object"}));
}

#[test]
fn the_last_turn_of_the_assistant_is_continued() {
    let turns =
        |last: Value| json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": last}]);
    let found = chat(json!({"messages": turns(json!("The"))})).expect("a chat");
    assert_eq!(
        (&found["continue_final_message"], &found["add_generation_prompt"]),
        (&json!(true), &json!(false))
    );
    let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
    // A response that `max_tokens` ended in its reasoning has no text to continue.
    let cut = json!([{"type": "thinking", "thinking": "hm", "signature": ""}]);
    for last in [call, cut, json!(""), json!(" \n")] {
        let found = chat(json!({"messages": turns(last.clone())})).expect("a chat");
        assert_eq!(found.get("continue_final_message"), None, "{last}");
    }
}

#[test]
fn a_count_has_only_what_makes_the_prompt() {
    let body = json!({"model": "m", "system": "s", "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"},
        "output_config": {"effort": "low"}, "temperature": 0.5});
    let found = Value::Object(to_tokenize(body.as_object().expect("an object")).expect("a request"));
    let names: Vec<_> = found.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(names, ["model", "messages", "tools", "tool_choice", "reasoning_effort"]);
}

#[test]
fn a_value_without_a_counterpart_is_refused_by_its_path() {
    let block = |block: Value| json!([{"role": "user", "content": [block]}]);
    let pdf = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}});
    let user = json!([{"role": "user", "content": "x"}]);
    for (body, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": "x"}), "messages"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [7]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": 7}]}), "messages[0].content"),
        (json!({"messages": block(json!(7))}), "messages[0].content[0].type"),
        (json!({"messages": block(json!({"type": "search_result"}))}), "messages[0].content[0].type"),
        (json!({"messages": block(json!({"type": "text"}))}), "messages[0].content[0].text"),
        (json!({"messages": block(json!({"type": "image"}))}), "messages[0].content[0].source.type"),
        (json!({"messages": block(pdf)}), "messages[0].content[0].source.type"),
        (json!({"messages": block(json!({"type": "tool_result"}))}), "messages[0].content[0].tool_use_id"),
        (json!({"messages": user, "system": 7}), "system"),
        (json!({"messages": user, "tools": [{"name": 7}]}), "tools[0].name"),
        (json!({"messages": user, "tools": [{"name": "w", "type": "web_search_20250305"}]}), "tools[0].type"),
        (json!({"messages": user, "tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}), "tool_choice"),
        (json!({"messages": user, "thinking": {"type": "x"}}), "thinking"),
        (json!({"messages": user, "output_config": {"format": {"type": "x"}}}), "output_config.format"),
        (json!({"messages": user, "stop_sequences": "x"}), "stop_sequences"),
        (json!({"messages": user, "mcp_servers": [{}]}), "mcp_servers"),
        (json!({"messages": user, "max_tokens": null}), "max_tokens"),
    ] {
        let found = chat(body.clone()).map(drop).map_err(|error| (error.status, error.param));
        assert_eq!(found, Err((400, Some(param.to_owned()))), "{body}");
    }
}

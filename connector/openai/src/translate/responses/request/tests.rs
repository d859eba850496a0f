//! Requests as chats: the whole mapping, and what is refused.

use super::*;

fn chat(mut body: Value) -> Result<Value, ApiError> {
    let fields = body.as_object_mut().expect("an object");
    fields.entry("input").or_insert(json!("hi"));
    to_chat(fields).map(Value::Object)
}

fn messages(input: Value) -> Value {
    chat(json!({"input": input})).expect("a chat")["messages"].clone()
}

#[test]
fn texts_and_sampling_keep_their_meaning() {
    let found = chat(json!({
        "model": "m", "instructions": "Be brief.", "input": "Hi", "max_output_tokens": 8, "stream": true,
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "user": "u", "parallel_tool_calls": false,
        "store": true, "service_tier": "auto", "metadata": {"a": "b"}, "truncation": "disabled",
        "background": false, "previous_response_id": null, "top_logprobs": 3, "safety_identifier": "s",
        "include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": false},
        "tools": [], "context_management": [], "text": {"format": {"type": "text"}, "verbosity": "low"},
    }));
    let expected = json!({
        "model": "m", "stream": true, "temperature": 0.5, "top_p": 0.9, "seed": 7,
        "parallel_tool_calls": false, "user": "u", "max_tokens": 8,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    });
    assert_eq!(found.expect("a chat"), expected);
}

#[test]
fn a_conversation_with_tools_is_translated_in_order() {
    let image = json!({"type": "input_image", "image_url": "data:image/png;base64,QQ==", "detail": "auto"});
    let input = json!([
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}, image]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": null,
            "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I ", "annotations": []},
                {"type": "output_text", "text": "look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{\"a\":1}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "21"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": "21 degrees."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}});
    let expected = json!([
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, picture]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm",
            "tool_calls": [call("c1", "f", "{\"a\":1}"), call("c2", "g", "")]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
        {"role": "assistant", "content": "21 degrees.", "reasoning_content": "so"},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
    ]);
    assert_eq!(messages(input), expected);
}

#[test]
fn what_a_response_returned_is_what_the_next_request_sends() {
    let reply = json!({"id": "chatcmpl-1", "model": "m", "choices": [{"finish_reason": "tool_calls",
        "message": {"reasoning_content": "hm", "content": "so", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}}]});
    let echo = crate::translate::responses::RequestEcho::of(&Map::new());
    let response = crate::translate::responses::to_response(&reply, &echo).expect("a response");
    let response: Value = serde_json::from_str(&response).expect("JSON");
    let message = messages(response["output"].clone())[0].clone();
    let choice = &reply["choices"][0]["message"];
    for name in ["reasoning_content", "content", "tool_calls"] {
        assert_eq!(message[name], choice[name], "{name}");
    }
}

#[test]
fn a_call_that_a_limit_cut_can_be_sent_back() {
    for (written, sent) in
        [("{\"a\":", "{}"), ("[1]", "{}"), ("{} {", "{}"), ("", ""), ("{\"a\": 1}", "{\"a\": 1}")]
    {
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": written,
            "status": "incomplete"});
        let found = messages(json!([{"role": "user", "content": "x"}, call]));
        assert_eq!(found[1]["tool_calls"][0]["function"]["arguments"], sent, "{written}");
    }
}

#[test]
fn only_an_unfinished_message_of_the_assistant_is_continued() {
    for (status, is_continued) in [("incomplete", true), ("in_progress", true), ("completed", false)] {
        let blank = json!({"type": "message", "role": "assistant", "status": status, "content": " "});
        let found = chat(json!({"input": [{"role": "user", "content": "x"}, blank]})).expect("a chat");
        assert_eq!(found.get("continue_final_message"), None, "there is nothing to continue");
        let last = json!({"type": "message", "role": "assistant", "status": status, "content": "The"});
        let found = chat(json!({"input": [{"role": "user", "content": "x"}, last]})).expect("a chat");
        assert_eq!(found.get("continue_final_message").is_some(), is_continued, "{status}");
        assert_eq!(found.get("add_generation_prompt").is_some(), is_continued, "{status}");
        assert_eq!(found["messages"][1], json!({"role": "assistant", "content": "The"}));
    }
}

#[test]
fn tools_formats_and_effort_have_the_forms_of_a_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let tool =
        json!({"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": true});
    let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
    for (choice, expected) in [
        (json!("required"), json!("required")),
        (json!("auto"), json!("auto")),
        (json!({"type": "function", "name": "f"}), json!({"type": "function", "function": {"name": "f"}})),
        (json!(null), json!(null)),
    ] {
        let found = chat(json!({"tools": [tool], "tool_choice": choice})).expect("a chat");
        assert_eq!(found["tools"], json!([{"type": "function", "function": function}]));
        assert_eq!(found["tool_choice"], expected);
    }
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let found = chat(json!({"text": {"format": format}, "reasoning": {"effort": "low", "summary": "auto"}}));
    let found = found.expect("a chat");
    let named = json!({"name": "n", "schema": schema, "strict": true});
    assert_eq!(found["response_format"], json!({"type": "json_schema", "json_schema": named}));
    assert_eq!(found["reasoning_effort"], "low");
    let object = chat(json!({"text": {"format": {"type": "json_object"}}})).expect("a chat");
    assert_eq!(object["response_format"], json!({"type": "json_object"}));
    let logprobs = chat(json!({"include": [LOGPROBS], "top_logprobs": 2})).expect("a chat");
    assert_eq!((&logprobs["logprobs"], &logprobs["top_logprobs"]), (&json!(true), &json!(2)));
}

#[test]
fn a_value_without_a_counterpart_is_refused_by_its_path() {
    let item = |item: Value| json!({"input": [item]});
    let user = |part: Value| json!({"input": [{"role": "user", "content": [part]}]});
    for (body, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 7}), "input"),
        (item(json!(7)), "input[0]"),
        (item(json!({})), "input[0].type"),
        (item(json!({"type": "web_search_call"})), "input[0].type"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"type": "message"})), "input[0].role"),
        (item(json!({"role": "tool", "content": "x"})), "input[0].role"),
        (item(json!({"role": "user"})), "input[0].content"),
        (item(json!({"role": "user", "content": 7})), "input[0].content"),
        (user(json!({"type": "input_file", "file_id": "f"})), "input[0].content[0].type"),
        (user(json!({"type": "input_image", "file_id": "f"})), "input[0].content[0].image_url"),
        (user(json!({"type": "input_text"})), "input[0].content[0].text"),
        (item(json!({"type": "function_call", "name": "f", "call_id": "c"})), "input[0].arguments"),
        (item(json!({"type": "function_call", "name": "f", "arguments": "{}"})), "input[0].call_id"),
        (
            item(json!({"type": "function_call", "name": "f", "call_id": "c", "arguments": {}})),
            "input[0].arguments",
        ),
        (item(json!({"type": "function_call_output", "output": "x"})), "input[0].call_id"),
        (item(json!({"type": "function_call_output", "call_id": "c"})), "input[0].output"),
        (json!({"instructions": ["x"]}), "instructions"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"context_management": [{"type": "compaction"}]}), "context_management"),
        (json!({"metadata": "x"}), "metadata"),
        (json!({"metadata": {"a": [0]}}), "metadata"),
        (json!({"max_tool_calls": [0]}), "max_tool_calls"),
        (json!({"prompt_cache_key": [0]}), "prompt_cache_key"),
        (json!({"safety_identifier": {}}), "safety_identifier"),
        (json!({"service_tier": 7}), "service_tier"),
        (json!({"user": [0]}), "user"),
        (json!({"reasoning": {"summary": [0]}}), "reasoning.summary"),
        (json!({"text": {"verbosity": [0]}}), "text.verbosity"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "custom", "name": "f"}]}), "tools[0].type"),
        (json!({"tools": [7]}), "tools[0]"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice"),
        (json!({"tool_choice": "web_search"}), "tool_choice"),
        (json!({"reasoning": {"effort": 7}}), "reasoning.effort"),
        (json!({"text": {"format": {"type": "grammar"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"include": ["x"]}), "include[0]"),
    ] {
        let found = chat(body.clone()).map(drop).map_err(|error| (error.status, error.param));
        assert_eq!(found, Err((400, Some(param.to_owned()))), "{body}");
    }
}

//! What a chat's reply has beside its text: reasoning, and calls of tools.

use serde::ser::{Serialize, SerializeStruct, Serializer};

/// The parts of a complete message beside its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageParts {
    /// The reasoning; empty without.
    pub reasoning: String,
    /// The calls, in order.
    pub calls: Vec<ToolCall>,
    /// Whether a text that ended by itself ended because of its calls. Not if the request named their function.
    pub called: bool,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id, to which the result of the call refers.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// The arguments, as the model wrote them: normally a JSON object.
    pub arguments: String,
}

/// The addition of one step to a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// The index of the call in its message.
    pub index: u32,
    /// Id and name, in the first delta of a call.
    pub head: Option<(String, String)>,
    /// New text of the arguments; may be empty.
    pub arguments: String,
}

#[derive(serde::Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut call = serializer.serialize_struct("ToolCall", 3)?;
        call.serialize_field("id", &self.id)?;
        call.serialize_field("type", "function")?;
        call.serialize_field("function", &Function { name: Some(&self.name), arguments: &self.arguments })?;
        call.end()
    }
}

impl Serialize for CallDelta {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut call = serializer.serialize_struct("CallDelta", 4)?;
        call.serialize_field("index", &self.index)?;
        if let Some((id, _)) = &self.head {
            call.serialize_field("id", id)?;
            call.serialize_field("type", "function")?;
        }
        let name = self.head.as_ref().map(|(_, name)| name.as_str());
        call.serialize_field("function", &Function { name, arguments: &self.arguments })?;
        call.end()
    }
}

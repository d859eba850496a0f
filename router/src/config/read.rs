//! How a configuration file is read: its shape, its document with places, and contradictions between keys.

pub(crate) mod contradictions;
pub(crate) mod document;
pub(crate) mod schema;
pub(crate) mod shape;

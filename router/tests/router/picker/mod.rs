//! Tests of the endpoint picker by a gateway that plays ext_proc messages in any order.

pub(crate) mod bounds;
pub(crate) mod choices;
pub(crate) mod failures;
pub(crate) mod gateway;
pub(crate) mod inference_pool;
pub(crate) mod releases;
pub(crate) mod tls;

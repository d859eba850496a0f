//! Which engines serve a request: models, pools, policies, the disaggregation decision, and explanations.

pub(crate) mod api_support;
pub(crate) mod disaggregation;
pub(crate) mod explain;
pub(crate) mod models;
pub(crate) mod policy;
pub(crate) mod pool;
pub(crate) mod tokenizer;

//! Which path is what.

use baton_openai::{ApiError, Endpoint};
use hyper::Method;

/// What a client asks of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route<'a> {
    /// To generate.
    Generate(Endpoint),
    /// To be told the models.
    Models,
    /// To be told one model.
    Model(&'a str),
    /// Whether the router is alive.
    Health,
    /// Which version it is.
    Version,
    /// Something that one decode engine answers, at this path.
    Pass(&'static str),
}

impl<'a> Route<'a> {
    /// # Errors
    /// 404, or 405 where only the method is wrong.
    pub(crate) fn of(method: &Method, path: &'a str) -> Result<Self, ApiError> {
        let (route, allowed) = match path {
            "/v1/models" => (Self::Models, Method::GET),
            "/health" => (Self::Health, Method::GET),
            "/version" => (Self::Version, Method::GET),
            "/tokenize" => (Self::Pass("/tokenize"), Method::POST),
            "/detokenize" => (Self::Pass("/detokenize"), Method::POST),
            _ => match (Endpoint::at(path), path.strip_prefix("/v1/models/")) {
                (Some(endpoint), _) => (Self::Generate(endpoint), Method::POST),
                (None, Some(name)) if !name.is_empty() => (Self::Model(name), Method::GET),
                (None, _) => return Err(ApiError::not_found(path)),
            },
        };
        if *method == allowed {
            return Ok(route);
        }
        Err(ApiError::method_not_allowed(method.as_str(), allowed.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_exactly_and_by_its_method() {
        let route = |method, path| Route::of(&method, path).map_err(|e| e.status);
        assert_eq!(route(Method::POST, "/v1/completions"), Ok(Route::Generate(Endpoint::Completions)));
        assert_eq!(route(Method::GET, "/v1/models/a/b"), Ok(Route::Model("a/b")));
        assert_eq!(route(Method::GET, "/v1/completions"), Err(405));
        for unknown in ["/", "/v1/completions/", "/kv/release", "/abort_requests", "/v1/models/", "/metrics"]
        {
            assert_eq!(route(Method::POST, unknown), Err(404), "{unknown}");
        }
    }
}

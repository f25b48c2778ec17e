//! Errors in the forms that clients read.

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode, header},
};
use mt_data::DataError;
use mt_engine::{EngineError, serve::SubmitError};
use serde_json::{Value, json};

/// The result of handling a request.
pub type Result<T, E = ApiError> = std::result::Result<T, E>;

/// The seconds after which a refused client may try again.
const RETRY_AFTER: u32 = 1;

/// An error that a client receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    /// The class of the error in OpenAI's words.
    pub kind: &'static str,
    pub code: Option<&'static str>,
    /// The field of the request that is wrong.
    pub parameter: Option<String>,
    pub message: String,
    /// The seconds after which the client may try again.
    pub retry_after: Option<u32>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, parameter: None, message: message.into(), retry_after: None }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        Self { parameter: Some(name.to_owned()), ..Self::invalid(message) }
    }

    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub fn wrong_method(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// The API key is missing or wrong.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).with_code("invalid_api_key")
    }

    /// Too many requests wait.
    pub fn busy() -> Self {
        let message = "too many requests wait for an answer; try again later";
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after: Some(RETRY_AFTER), ..error }.with_code("queue_full")
    }

    /// The server has too many connections.
    pub fn crowded() -> Self {
        let message = "the server has too many connections; try again later";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message);
        Self { retry_after: Some(RETRY_AFTER), ..error }.with_code("too_many_connections")
    }

    /// The server ends.
    pub fn shutting_down() -> Self {
        let error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable_error",
            "the server is shutting down",
        );
        Self { retry_after: Some(RETRY_AFTER), ..error }.with_code("shutting_down")
    }

    /// The engine answers no requests any more, until the server is started again.
    pub fn broken(failure: &str) -> Self {
        let error = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable_error",
            format!("the engine has failed: {failure}"),
        );
        Self { retry_after: Some(RETRY_AFTER), ..error }.with_code("engine_failed")
    }

    /// The answer takes longer than the server allows.
    pub fn timeout(seconds: u64) -> Self {
        let message = format!("the answer was not complete after {seconds} s, the server's limit");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).with_code("timeout")
    }

    /// The request did not arrive in time.
    pub fn slow_request(seconds: u64) -> Self {
        let message = format!("the request's body did not arrive within {seconds} s");
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message)
    }

    /// A failure of the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// OpenAI's error object.
    pub fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.parameter,
            "code": self.code,
        }})
    }

    /// Anthropic's error object.
    pub fn anthropic_body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        json!({ "type": "error", "error": { "type": kind, "message": self.message } })
    }

    /// The response with this error, as one of the interfaces writes it.
    pub fn response(&self, body: &Value) -> Response<Body> {
        let mut response = json_response(self.status, body);
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl axum::response::IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        self.response(&self.body())
    }
}

/// A response with a JSON body.
pub fn json_response(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A message without the hint for users of the command line.
fn without_hint(message: &str) -> String {
    message.split("\nhint: ").next().unwrap_or_default().to_owned()
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = without_hint(&error.to_string());
        match error {
            EngineError::PromptTooLong { length, limit, .. } => {
                Self::invalid(format!("the prompt has {length} tokens, but at most {limit} fit"))
                    .with_code("context_length_exceeded")
            }
            EngineError::EmptyPrompt { .. } => Self::invalid("the prompt has no token"),
            EngineError::UnknownToken { token, vocab_size, .. } => Self::invalid(format!(
                "the prompt has token {token}, but the model's vocabulary has {vocab_size} tokens"
            )),
            error if error.is_user_error() => Self::invalid(message),
            _ => Self::internal(message),
        }
    }
}

impl From<DataError> for ApiError {
    fn from(error: DataError) -> Self {
        Self::invalid(without_hint(&error.to_string()))
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Invalid(error) => error.into(),
            SubmitError::QueueFull { .. } => Self::busy(),
            SubmitError::ShuttingDown => Self::shutting_down(),
        }
    }
}

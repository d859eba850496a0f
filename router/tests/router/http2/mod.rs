//! Requests to engines over HTTP/2.

mod frames;
mod negotiation;
mod streams;

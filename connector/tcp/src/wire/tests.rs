//! The codec against itself and against noise.

//! What is asked and what is right.

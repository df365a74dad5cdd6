//! The library inside a container that keeps its processes inside their grant.

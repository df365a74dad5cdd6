//! Files that stand in for the libraries of a driver.

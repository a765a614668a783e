// Nothing: a library of TensorFlow's name to link to. At run time the name is TensorFlow's own library, which the
// process has loaded before.

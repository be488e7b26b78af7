// Carries the precompiled header; has nothing else to say.

// Shim: see README.md in this folder.
#pragma once

# However ranks divide the model, and whether they keep activations or not, they train it as one process does.
include("${CMAKE_CURRENT_LIST_DIR}/../common/losses.cmake")
set(small --batch-size 8 --context 32 --write 4)

train(one 1 ${small})
train(ddp 2 ${small} --parallel ddp)
train(zero 2 ${small} --parallel zero)
train(fsdp 2 ${small} --parallel fsdp)
train(checkpointed 2 ${small} --parallel fsdp --checkpoint-activations)
expect_same_bits(ddp zero fsdp checkpointed)
train(tp 2 ${small} --parallel tp --checkpoint-activations)
train(both 4 ${small} --parallel fsdp+tp --checkpoint-activations)
expect_same_digits(one ddp tp both)
